"""Supported layouts, one per module."""

from ..layout import Layout
from ..toolkits import fairseq, opennmt
from . import (
    aladdin_persson,
    annotated,
    bentrevett,
    gordicaleksa,
    hkproj,
    hyunwoongko,
    jadore,
    joeynmt,
    notebook,
    separate_heads,
    torch_transformer,
)

LAYOUTS: dict[str, Layout] = {
    layout.name: layout
    for layout in (
        *(aladdin_persson.LAYOUT, aladdin_persson.SEQ2SEQ, annotated.LAYOUT, bentrevett.LAYOUT, bentrevett.OLDER),
        *(hkproj.ARTICLE, hkproj.REPAIRED_ARTICLE, gordicaleksa.LAYOUT, hkproj.LAYOUT, hyunwoongko.LAYOUT),
        *(jadore.LAYOUT, joeynmt.LAYOUT, notebook.LAYOUT, separate_heads.LAYOUT, torch_transformer.LAYOUT),
        *(fairseq.LAYOUT, opennmt.LAYOUT),
    )
}
