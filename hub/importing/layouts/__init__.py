"""The layouts that are known, one file each."""

from hub.importing.layout import Layout
from hub.importing.layouts import (
    aladdin_persson,
    annotated,
    bentrevett,
    build_transformer,
    gordicaleksa,
    hkproj,
    hyunwoongko,
    jadore,
    joeynmt,
    notebook,
    separate_heads,
    torch_transformer,
)
from hub.importing.toolkits import fairseq, opennmt

LAYOUTS: dict[str, Layout] = {
    layout.name: layout
    for layout in (
        aladdin_persson.LAYOUT,
        aladdin_persson.AROUND_TORCH,
        annotated.LAYOUT,
        bentrevett.LAYOUT,
        bentrevett.OLDER,
        build_transformer.LAYOUT,
        build_transformer.REPAIRED,
        fairseq.LAYOUT,
        gordicaleksa.LAYOUT,
        hkproj.LAYOUT,
        hyunwoongko.LAYOUT,
        jadore.LAYOUT,
        joeynmt.LAYOUT,
        notebook.LAYOUT,
        opennmt.LAYOUT,
        separate_heads.LAYOUT,
        torch_transformer.LAYOUT,
    )
}
