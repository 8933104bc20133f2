"""All first uses, theme by theme."""

from __future__ import annotations

from tests.ordinary.compressed import compressed
from tests.ordinary.contrastive import contrastive
from tests.ordinary.generative import generative
from tests.ordinary.graphs import graphs
from tests.ordinary.habits import habits
from tests.ordinary.language import language
from tests.ordinary.physics import physics
from tests.ordinary.recurrent import recurrent
from tests.ordinary.segmentation import segmentation
from tests.ordinary.tabular import tabular
from tests.ordinary.use import Use
from tests.ordinary.vision import vision

THEMES = (vision, segmentation, language, contrastive, generative, graphs, physics, recurrent, tabular, compressed, habits)
USES: list[Use] = [use for theme in THEMES for use in theme]
# Every so manieth use is in the fast part of the tests, too.
SHARE = 4
QUICK = USES[::SHARE]
