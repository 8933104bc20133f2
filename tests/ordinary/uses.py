"""All first uses, theme by theme."""

from __future__ import annotations

from tests.ordinary.contrastive import contrastive
from tests.ordinary.generative import generative
from tests.ordinary.language import language
from tests.ordinary.segmentation import segmentation
from tests.ordinary.use import Use
from tests.ordinary.vision import vision

THEMES = (vision, segmentation, language, contrastive, generative)
USES: list[Use] = [use for theme in THEMES for use in theme]
# Every so manieth use is in the fast part of the tests, too.
SHARE = 4
QUICK = USES[::SHARE]
