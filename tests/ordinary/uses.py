"""All first uses, theme by theme."""

from __future__ import annotations

from importlib.util import find_spec

from tests.ordinary.compressed import compressed
from tests.ordinary.contrastive import contrastive
from tests.ordinary.generative import generative
from tests.ordinary.graphs import graphs
from tests.ordinary.habits import habits
from tests.ordinary.huggingface import huggingface, peft
from tests.ordinary.image_scripts import image_scripts
from tests.ordinary.language import language
from tests.ordinary.physics import physics
from tests.ordinary.recurrent import recurrent
from tests.ordinary.segmentation import segmentation
from tests.ordinary.series_scripts import series_scripts
from tests.ordinary.table_scripts import table_scripts
from tests.ordinary.tabular import tabular
from tests.ordinary.text_scripts import text_scripts
from tests.ordinary.use import Use
from tests.ordinary.vision import vision

# After public repositories' own training scripts.
OF_SCRIPTS = (text_scripts, image_scripts, series_scripts, table_scripts)
PLAIN = (
    vision, segmentation, language, contrastive, generative, graphs, physics, recurrent, tabular, compressed, habits,
    *OF_SCRIPTS,
)  # fmt: skip
NEED_TRANSFORMERS = (huggingface, peft)
USES: list[Use] = [use for theme in (*PLAIN, *NEED_TRANSFORMERS) for use in theme]
# Every so manieth use that needs PyTorch alone is in the fast part of the tests, too.
SHARE = 8


def needed_packages_are_there() -> bool:
    return all(find_spec(name) for name in ("transformers", "peft"))
