"""``python -m tests.mutants``: small faults in rules, mixing, products, filling and the check of HDF5 files, one at a time.

A fault that no test sees is printed; the exit code is their number. It works on a copy of the repository, in a few
minutes. With words, only the faults of files whose path contains one of them are tried.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
RULES = (
    "tests/test_conformance.py -k test_a_rule or test_a_topology",
    "tests/test_algorithms.py",
)
MIXING = ("tests/test_mixing.py",)
PRODUCTS = (
    "tests/test_spectrum.py -k dense or textbook or trace or matrix",
    "tests/test_products_checked.py -k penalty",
    "tests/test_public_api.py",
    "tests/test_any_model.py",
    "tests/test_optimizer.py -k dense_matrix or diagonal",
)
FILLING = ("tests/test_adaptive.py",)
FILES = "tests/test_files.py", "tests/test_harm.py"
#: Folder or file under landscape/ -> the tests that see its faults, and (file, what stands there, what does in the mutant).
MUTANTS: dict[tuple[str, ...], list[tuple[str, str, str]]] = {
    ("tests/test_stability.py",): [("limits/__init__.py", "omega**2 if", "omega if")],
    MIXING: [
        ("training/topology/finite_time.py", "quotient //= factor", "quotient //= quotient"),
        ("training/topology/finite_time.py", "cube[t % len(cube)]", "cube[0]"),
        ("training/topology/__init__.py", "product = m @ product", "product = m"),
    ],
    RULES: [
        ("training/algorithms/central.py", "(weights), directions, alpha=lr,", "(weights), directions, alpha=2 * lr,"),
        ("training/algorithms/dpsgd.py", 'directions - self.state["direction"]', "directions"),
        ("training/algorithms/dpsgd.py", 'weights - self.state["stepped"]', "weights - weights"),
        ("training/algorithms/dpsgd.py", "mixed - anchor, alpha", "mixed - new, alpha"),
        ("training/algorithms/dpsgd.py", "self.mixing, step // self.period)()", "self.mixing, step)()"),
        ("training/algorithms/central.py", "self.mu_x * self.mu_y,", "self.mu_x,"),
        ("training/algorithms/central.py", 'lerp(self.shared["z"], weights, self.mu_y)', 'lerp(self.shared["z"], weights, 1.0)'),
        ("training/algorithms/partial.py", "momentum - self._restored(sent)", "momentum"),
        ("training/algorithms/partial.py", ".sign_()", ""),
        ("training/algorithms/partial.py", "error - self._restored(sent)", "error"),
        ("training/algorithms/partial.py", '] *= ~reached', '] *= reached'),
        ("training/algorithms/partial.py", 'slot.layer != "embedding"', "True"),
        ("training/algorithms/central.py", "max_stable_step(0,", "max_stable_step(1,"),
        ("training/algorithms/central.py", "+ self.sigma * draw", "+ self.sigma**2 * draw"),
        ("training/algorithms/dpsgd.py", "self._mixed(), directions, alpha=lr", "self._mixed(), directions, alpha=2 * lr"),
        ("training/algorithms/dpsgd.py", "torch.sub(weights, directions, alpha=lr)\n        return", "torch.sub(weights, directions, alpha=lr / 2)\n        return"),
        ("training/algorithms/dpsgd.py", 'if self.order == "awc" else limits.max_stable', 'if self.order == "atc" else limits.max_stable'),
        ("training/algorithms/dpsgd.py", "(1 + self._mixed_buffers)", "(1 - self._mixed_buffers)"),
        ("training/algorithms/central.py", "(step - self.first) % self.period == 0", "step % self.period == 0"),
        ("training/algorithms/central.py", "self.node_period == 0:\n            new.copy_", "self.node_period == 1:\n            new.copy_"),
        ("training/algorithms/central.py", "slow += displacement / lr", "slow += displacement"),
        ("training/algorithms/central.py", "self.outer_lr * lr * slow", "self.outer_lr * slow"),
        ("training/algorithms/central.py", "(displacement + self.outer_momentum * slow)", "slow"),
        ("training/algorithms/central.py", "step - 1 - int(self.shared", "step - int(self.shared"),
        ("training/algorithms/dpsgd.py", "(step - 1 - delays", "(step - delays"),
        ("training/algorithms/dpsgd.py", "q = p * w.numpy() / new.numpy()[:, None]", "q = p * 1.0"),
        ("training/algorithms/dpsgd.py", "(lr / self.peak_lr) ** self.power", "lr / self.peak_lr"),
    ],
    PRODUCTS: [
        ("curvature/hessian.py", "alpha=share", "alpha=1.0"),
        ("curvature/hessian.py", "self.loss_gradient, self.z, jvp", "self.loss_gradient, self.z, 2 * jvp"),
        ("curvature/operators.py", "len(rows)\n        images = self._finite", "2 * len(rows)\n        images = self._finite"),
        ("curvature/hessian.py", "gradients(self.gradient, [self.weights], v, keep=True)[0]", "-gradients(self.gradient, [self.weights], v, keep=True)[0]"),
        ("curvature/operators.py", "mul_(2).sub_(1)", "mul_(2).sub_(0.9)"),
        ("curvature/trace.py", "products - 2 * basis_size", "products - 3 * basis_size"),
        ("curvature/chain_hessian.py", "moved - p * moved.sum(1, keepdim=True)", "moved"),
        ("curvature/chain_hessian.py", "torch.addcmul(r, second, rzs[i - 1])", "torch.addcmul(r, second, rzs[i - 1], value=-1)"),
    ],
    FILLING: [
        ("evaluation/interpolant.py", "coefficients[:n] / np.diagonal", "coefficients[:n] * np.diagonal"),
        ("evaluation/interpolant.py", "if sum(e) <= degree", "if sum(e) < degree"),
        ("evaluation/grid.py", "previous_tolerance.size <= tolerance.size", "previous_tolerance.size >= tolerance.size"),
        ("evaluation/fit.py", "np.exp(predicted) * np.expm1(errors)", "np.expm1(errors)"),
        ("evaluation/fit.py", "holes**self.function.interpolant.order).max(1)", "holes**self.function.interpolant.order).min(1)"),
        ("evaluation/fit.py", "(corners > 0) & (corners < 3)", "corners > 3"),
    ],
    FILES: [
        ("core/hdf5_check.py", "if depth > DEPTH:", "if depth > 99 * DEPTH:"),
        ("core/hdf5_check.py", "if group.links.get_info(name).type != h5py.h5l.TYPE_HARD:", "if False:"),
        ("core/hdf5_check.py", "layout == h5py.h5d.VIRTUAL or properties.", "properties."),
        ("core/hdf5_check.py", " or properties.get_external_count():", ":"),
        ("core/hdf5_check.py", " or filters.count(code) > 1", ""),
        ("core/hdf5_check.py", "if not inside or chunk.filter_mask or", "if chunk.filter_mask or"),
        ("core/hdf5_check.py", "if size != stored_size:", "if False:"),
        ("core/hdf5_check.py", "if self.uncompressed_bytes > self.length:", "if False:"),
        ("core/hdf5_check.py", "if count > ATTRIBUTES:", "if False:"),
        ("core/hdf5_check.py", "if address in self.addresses:", "if False:"),
    ],
}  # fmt: skip


def killed(copy: Path, tests: tuple[str, ...]) -> bool:
    """Whether one of the ``tests`` fails in the copy."""
    environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    for test in tests:
        path, _, words = test.partition(" -k ")
        argv = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", path]
        argv += ["-k", words] if words else []
        if subprocess.run(argv, cwd=copy, env=environment, capture_output=True).returncode == 1:
            return True
    return False


def main() -> int:
    """The number of faults that survive."""
    survived = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in ("landscape", "tests", "benchmarks", "docs"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        for tests, mutants in MUTANTS.items():
            for name, old, new in mutants:
                if sys.argv[1:] and not any(word in name for word in sys.argv[1:]):
                    continue
                path = copy / "landscape" / name
                text = path.read_text()
                if text.count(old) != 1:
                    raise SystemExit(f"{name}: '{old}' stands there {text.count(old)} times, it must be once")
                path.write_text(text.replace(old, new))
                seen = killed(copy, tests)
                survived += not seen
                print(f"{'killed  ' if seen else 'SURVIVED'} {name}: {old} -> {new}", flush=True)
                path.write_text(text)
    return survived


if __name__ == "__main__":
    sys.exit(main())
