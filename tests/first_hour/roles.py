"""The first hour of seven people: what they type, and what they must see.

Each was played with the README's first screen alone, before it was written down. What was typed is a command of
a shell, or Python, of which the printed text and the value of the last line are seen; what is seen also has the
error of a line that fails. ``runs/ss`` and ``runs/dp`` are short runs, which :data:`TRAINING` makes once.

An hour is a list of (typed, fragments that are seen, in any order).
"""

from __future__ import annotations

Hour = list[tuple[str, list[str]]]

SHORT = "--set steps=20 --set checkpoint.every=20 --set evaluate.every=10"

TRAINING: Hour = [
    (f"$ landscape train digits-ssgd -o runs/ss {SHORT}", ["step 20: test loss", "runs/ss/last.h5", "next: "]),
    (f"$ landscape train digits-dpsgd -o runs/dp {SHORT}", ["stable while lr·λ_max < 1 + ω_min = 1"]),
]  # fmt: skip

STUDENT: Hour = [
    ("""
from pathlib import Path
Path("cnn.py").write_text('''
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.last = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Linear(64, 10)
    def forward(self, x):
        x = torch.relu(self.norm(self.conv(x.view(-1, 1, 8, 8))))
        return self.last(nn.functional.max_pool2d(x, 2).flatten(1))
''')
import torch, landscape
from cnn import Net
torch.manual_seed(0)
model, loss = Net(), torch.nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
x, y = landscape.data.load("digits").train
for step in range(40):
    rows = torch.randint(len(y), (64,))
    optimizer.zero_grad()
    loss(model(x[rows]), y[rows]).backward()
    optimizer.step()
    step in (0, 20) and torch.save(model.state_dict(), f"net-{step}.pt")
torch.save(model.state_dict(), "net.pt")
""", []),
    ("landscape.data.load('digits')", ["Dataset(1,437 train, 360 test; 10 classes)"]),
    ("problem = landscape.Problem(model, loss, (x, y)); problem", ["Net", "698 parameters", "1,437 samples"]),
    ("plane = landscape.random_plane(problem, norm='filter', seed=0); plane", ["random; norm filter, seed 0"]),
    ("surface = landscape.contour(problem, plane, grid=(5, 5), span=0.5); surface", ["lowest loss", " nat"]),
    ("surface.check()", ["center: ", "window: ", "LOOK  BatchNorm", 'bn="recalibrate"']),
    ("surface.plot(path='surface.png'); Path('surface.png').exists()", ["True"]),
    ("landscape.contour(problem, landscape.pca_plane(problem, ['net-0.pt', 'net-20.pt', 'net.pt']), 5).plot().get_suptitle()",
     ["Along the trajectory the loss goes from "]),
    ("[ax.get_title() for ax in landscape.draw({'SGD': surface, 'SAM': surface}, width=3.3).axes]", ["'SGD'", "'SAM'"]),
    ("print(landscape.compare({'A': problem, 'B': problem}, quantities=['lambda-max']))", ["λ_max, A", "λ_max, B"]),
    ("ends = landscape.extreme_eigenvalues(problem); ends", ["λ_1 ", "λ_min ", " ± ", " nat"]),
    ("print(ends.summary())", ["converged", "Hessian products"]),
    ("$ landscape contour net.pt --grid 3", ["exit 2", "--model: missing; net.pt has only weights"]),
    ("$ landscape contour net.pt --model cnn:Net --grid 3", ["exit 1", "its data is not known; give --data"]),
    ("$ landscape contour net.pt --model cnn:Net --data digits --grid 3", ["lowest loss", "net-contour.h5"]),
    ("$ landscape contuor net.pt", ["exit 2", "contour"]),
]  # fmt: skip

ENGINEER: Hour = [
    ("""
import torch, landscape
from transformers import GPT2Config, GPT2LMHeadModel
torch.manual_seed(0)
config = GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(config)
batches = [{"input_ids": part, "labels": part} for part in torch.randint(32, (8, 8)).split(4)]
problem = landscape.Problem(model, None, batches)
problem
""", ["GPT2LMHeadModel", "parameters"]),
    ("landscape.contour(problem, landscape.random_plane(problem, norm='filter'), 3)", ["lowest loss"]),
    ("landscape.extreme_eigenvalues(problem)", ["λ_min", " ± "]),
    ("landscape.curvature_table(problem, by='block')", ["h.0", "trace"]),
    ("landscape.Problem(model, torch.nn.CrossEntropyLoss(), batches)", ["InputError", "loss"]),
    ("""
class InBfloat16(GPT2LMHeadModel):
    def forward(self, **batch):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(**batch)
low = InBfloat16(config)
low.load_state_dict(model.state_dict())
mask = (torch.arange(8) < 5).long().expand(4, 8)
batches = [{**each, "attention_mask": mask, "labels": each["labels"].masked_fill(mask == 0, -100)} for each in batches]
exact, low = (landscape.Problem(each, None, batches) for each in (model, low))
exact, low = (landscape.contour(each, landscape.random_plane(each, norm="filter"), 3).loss for each in (exact, low))
difference = abs(low - exact) / exact
bool((0 < difference).any() and (difference < 2**-8).all())
""", ["True"]),
    ("landscape.contour(problem, landscape.random_plane(problem), 3, autocast='bfloat16')",
     ["InputError", "autocast: 'bfloat16' needs a model that torch.fx can trace"]),
]  # fmt: skip

SCALER: Hour = [
    ("""
import torch, landscape
from torch import nn
torch.manual_seed(0)
block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
model = nn.Sequential(nn.Embedding(32, 16), block, nn.Flatten(), nn.Linear(128, 32))  # the token after eight
tokens = torch.randint(32, (64, 9))
problem = landscape.Problem(model, nn.CrossEntropyLoss(), (tokens[:, :-1], tokens[:, -1]))
problem
""", ["Sequential", "parameters", "64 samples"]),
    ("landscape.forecast(landscape.extreme_eigenvalues, problem)",
     ["extreme_eigenvalues: some 33 Hessian products, about ", " MiB of memory at most, ", "are free"]),
    ("landscape.forecast(landscape.contour, problem, grid=101, max_memory=2**20)", ["at most, 0 MiB are free"]),
    ("landscape.extreme_eigenvalues(problem, max_memory=2**20)", ["InputError", "max_memory: ", "is not enough"]),
    ("top = landscape.top_eigenvalues(problem, 5); top", ["Eigenpairs", "λ_1 ", "λ_5 ", "more in summary()"]),
    ("top.summary()", ["Eigenpairs\n  λ_1 ", "converged         yes"]),
    ("landscape.contour(problem.subset(slice(0, 8)), landscape.random_plane(problem), 3).samples", ["8"]),
    ("landscape.curvature_table(problem, by='layer')", ["1.self_attn: λ_max", "trace"]),
]  # fmt: skip

RESEARCHER: Hour = [
    ("$ landscape contour runs/ss runs/dp --grid 3 --plot contour.png", ["ssgd", "dpsgd", "contour.png"]),
    ("$ landscape stability runs/dp", ["lr·λ_max", "limit 1"]),
    ("$ landscape hessian-grid runs/dp --grid 2 --samples 50 --split test", ["last-hessian-test-50-samples.h5"]),
    ("$ landscape compare runs/ss runs/dp --quantities lambda-max", ["λ_max (nat)", "flatter"]),
    ("$ landscape train digits-dpsg", ["exit 2", "did you mean 'digits-dpsgd'?"]),
    ("$ landscape train digits-dpsgd -o runs/x --set algorithm.mixing=rng", ["exit 2", "ring(k)"]),
    (f"$ landscape train digits-dpsgd -o runs/ring {SHORT} --set 'algorithm.mixing=ring(1)'",
     ["smallest eigenvalue ω_min -0.206"]),
    ("$ landscape train digits-dpsgd -o runs/ring", ["exit 1", "only steps may grow", "--force"]),
    ("import landscape; run = landscape.load('runs/dp'); run", ["mlp on digits", "5 × 6,310 weights", "test loss"]),
    ("run.to_dataframe()[['step', 'loss', 'alpha_e']].shape", ["(20, 3)"]),
    ("run.plot(path='curves.png'); landscape.noise(run, draws=2)", ["Δ(2) by definition", "Eq. 4 gives"]),
    ("landscape.disagreement(run, k=2)", ["spread in the top 2", "±"]),
    ("landscape.random_plane('runs/dp')", ["InputError", "landscape.load('runs/dp').problem()"]),
    ("landscape.load('runs')", ["OperationError", "give runs/", "another of its"]),
]  # fmt: skip

CHECKER: Hour = [
    ("$ landscape figures", ["fig2a ", "DPSGD-2020, Figure 2(a)", "delay-boundary"]),
    ("$ landscape figures fig2", ["exit 2", "'fig2' is not known; did you mean 'fig2"]),
    ("$ landscape figures fig2a --dry-run", ["15 of 15 runs to train", "data: mnist"]),
    ("$ landscape figures delay-boundary --scale smoke", ["its numbers say nothing", "figures/delay-boundary.png"]),
    ("from pathlib import Path; print(Path('figures/delay-boundary.md').read_text())", ["smoke", "claim"]),
    ("$ landscape recipes", ["mnist-fig2a-dpsgd", "cifar10/NETWORK-b{1024,2048,4096,8192}-{ssgd,dpsgd}: Table 3"]),
    ("$ landscape recipes cifar10/vgg-19-b128-*", ["vgg-19-b128-sgd", "n = 1, nB = 128, lr 0.1, 125000 steps"]),
    ("$ landscape recipes mnist-fig2a-dpsgd", ['mixing = "full"', "stable while lr·λ_max < 1"]),
    ("$ landscape train mine.toml", ["exit 1", "mine.toml: no such file; a recipe is needed"]),
    ("$ landscape stability runs/none", ["exit 1", "runs/none: no such file"]),
]  # fmt: skip

LECTURER: Hour = [
    ("$ landscape info runs/dp", ["step 20", "consensus distance"]),
    ("$ landscape plot runs/ss runs/dp -o curves.png", ["curves.png"]),
    ("$ landscape contour runs/ss runs/dp --grid 4 -o both.h5", ["both.h5"]),
    ("$ landscape plot both.h5 --style surface -o hill.png", ["hill.png"]),
    ("$ landscape info both.h5", ["fine  window", "lowest loss"]),
    ("$ landscape report runs/ss runs/dp both.h5 -o page.html", ["page.html"]),
    ("$ landscape report runs -o page.html", ["exit 1", "give runs/"]),
    ("import landscape; one, two = landscape.load('both.h5'); two.check()", ["fine  window", "directions: random"]),
    ("two._repr_html_()[:60]", ["<b>Surface: dpsgd"]),
]  # fmt: skip

PACKAGER: Hour = [
    ("""
import landscape, numpy as np
from landscape.plugins import Result, Rule, draws, finish, panels, registry
from landscape.testing import check_rule
@registry.algorithms.add("every-second")
class EverySecond(Rule):
    \"\"\"Local steps, and an average of all learners at every ``period``-th step.
    Args:
        period: Steps from an average to the next. Source: ours.
    \"\"\"
    def __init__(self, learners, seed, period: int = 2):
        super().__init__(learners, seed)
        self.period = period
    def gradient_points(self, weights):
        return weights
    def finish(self, weights, directions, lr, step):
        moved = weights - lr * directions
        return moved if step % self.period else self.comm.fresh_mean(moved, "mean").expand_as(moved).clone()
    def communication_cost(self, step):
        return (0.0, 0) if step % self.period else (self.all_reduce, 1)
    def stability_limit(self, momentum=0.0, form="ordinary"):
        return None
check_rule(EverySecond, {"period": 3})
class Undescribed(EverySecond):
    def __init__(self, learners, seed, depth: int = 1):
        super().__init__(learners, seed)
""", []),
    ("check_rule(Undescribed, only='documented')", ["AssertionError", "Undescribed needs, below Args, 'depth: "]),
    ("check_rule(EverySecond, {'perod': 3})", ["InputError", "perod", "period"]),
    ("landscape.train('digits-dpsgd', 'runs/own', steps=4, algorithm={'name': 'every-second', 'period': 3})",
     ["every-second, seed 0, step 4"]),
    ("landscape.train('digits-dpsgd', 'runs/other', algorithm={'name': 'every-secnd'})",
     ["InputError", "did you mean 'every-second'?"]),
    ("""
import dataclasses
from typing import Annotated
@dataclasses.dataclass(frozen=True)
class Growths(Result, schema="landscape.mine.heights", table="child"):
    height: Annotated[np.ndarray, "child", "m"]
    label: str = ""
@draws(Growths)
def draw_growths(results, title=""):
    figure, (ax,) = panels(1, 1, 4.0, 3.0)
    for each in results:
        ax.plot(each.height)
    return finish(figure, title or "Growths", "", [])
heights = Growths(np.array([0.75, 0.9]), label="two children")
heights
""", ["Growths: two children", "height  0.75 to 0.9 m"]),
    ("class Depths(Growths, schema='mine.depths'): pass", ["InputError", "landscape.NAME"]),
    ("heights.plot().get_suptitle()", ["Growths"]),
    ("heights.save('heights.h5'); landscape.load('heights.h5').to_dataframe().shape", ["(2, 1)"]),
    ("$ landscape plot heights.h5 -o heights.png", ["heights.png"]),
]  # fmt: skip

ROLES = {
    "student": STUDENT, "engineer": ENGINEER, "researcher": RESEARCHER, "lecturer": LECTURER, "packager": PACKAGER,
    "checker": CHECKER, "scaler": SCALER,
}  # fmt: skip
