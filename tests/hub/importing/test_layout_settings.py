import pytest

from hub.importing.layout_settings import resolve_settings
from hub.importing.layouts import LAYOUTS

JADORE = LAYOUTS["jadore801120"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("proj_share_weight=true", {"proj_share_weight": True}),
        ("proj_share_weight=False", {"proj_share_weight": False}),  # Python's spelling
        ("scale_emb_or_prj=emb", {"scale_emb_or_prj": "emb"}),
        ("src_pad_idx=3", {"src_pad_idx": 3}),
        ("source_begins=true", {"source_begins": True}),
    ],
)
def test_parses_values(text, expected):
    assert resolve_settings([text], {}, JADORE) == expected


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["proj_share_weigth=true"], "no setting proj_share_weigth; did you mean proj_share_weight?"),
        (["anything=1"], "no setting anything; choose from proj_share_weight, scale_emb_or_prj"),
        (["proj_share_weight=0"], "proj_share_weight must be true or false"),
        (["proj_share_weight=no"], "proj_share_weight must be true or false"),
        (["scale_emb_or_prj=both"], "scale_emb_or_prj must be emb or prj or none"),
        (["src_pad_idx=1.5"], "src_pad_idx must be an integer"),
        (["src_pad_idx=" + "[" * 10**5], "src_pad_idx must be an integer"),
        (["src_pad_idx=1", "src_pad_idx=2"], "--set src_pad_idx is repeated"),
        (["src_pad_idx"], "the format must be KEY=VALUE"),
    ],
)
def test_rejects_invalid_settings(texts, message):
    with pytest.raises(ValueError) as error:  # noqa: PT011  # the message is checked below
        resolve_settings(texts, {}, JADORE)
    assert message in str(error.value)


def test_merges_settings_of_the_file():
    """Entries that the layout does not know are ignored; `--set` has priority."""
    metadata = {"n_head": 4, "src_pad_idx": 1, "epoch": 3, "source_begins": "?"}
    assert resolve_settings(["src_pad_idx=0"], metadata, JADORE) == {"n_head": 4, "src_pad_idx": 0}
    with pytest.raises(ValueError, match="the file's n_head='four' must be an integer. Set it with --set n_head="):
        resolve_settings([], {"n_head": "four"}, JADORE)
