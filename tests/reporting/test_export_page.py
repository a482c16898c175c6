"""The page about an exported file, whichever the target."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np

from apportion.exporting.target import Exported, Table, Verification
from apportion.reporting.html.export_page import export_page

HOSTILE = '</td></table><script>alert("1")</script>'


def made(*verifications: Verification, tables: tuple[Table, ...] = ()) -> Exported:
    return Exported(
        path=Path("nets/net.nir"),
        target="spiking(timesteps=8)",
        nbytes=12_345,
        about={
            "inputs": [{"name": "input", "shape": [None, 3]}], "neurons": 1234, "exact": True, "nothing": None,
            "device": {"name": HOSTILE, "clock_mhz": 61.25},
        },
        verifications=verifications,
        tables=tables,
        conclusion="Spiking wins nothing here.",
    )  # fmt: skip


def cells(page: str) -> list[str]:
    return re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", page)


def test_every_reader_has_its_row_and_every_table_its_figures() -> None:
    one = Verification(
        reader="a reader 1.0", simulated_by=None, examples=203,
        difference=1e-6, limit=1e-4, network_difference=2e-3,
        held_out=200,
        before={"accuracy": 0.9173}, after={"accuracy": 0.91},
    )  # fmt: skip
    two = Verification(
        reader="another 2.0", simulated_by="apportion", examples=1200,
        difference=3e-5, limit=1e-4, network_difference=0.061,
        held_out=200,
        before={"accuracy": 0.9173}, after={"accuracy": 0.9},
    )  # fmt: skip
    table = Table(
        title="Spikes",
        columns=("layer", "spikes", "by"),
        rows=(("conv1", np.int64(12_000), 0.5), ("conv2", 7, float("nan"))),
        note=f"Counted on 200 images. {HOSTILE}",
    )
    page = export_page(made(one, two, tables=(table,)).to_json())
    found = cells(page)
    for cell in ("a reader 1.0", "another 2.0", "apportion", "1,200", "3.00e-05", "0.9173", "0.91", "0.9"):
        assert cell in found
    assert found[found.index("conv1") :][:6] == ["conv1", "12,000", "0.5", "conv2", "7", "nan"]
    for text in ("Spiking wins nothing here.", "spiking(timesteps=8)", "nets/net.nir", "12.3 kB", "0.061", "0.002"):
        assert text in page
    assert "The metrics were taken on 200 examples" in page
    assert "<script" not in page
    assert page.count("&lt;script&gt;") == 2


def test_a_file_without_metrics_has_a_page_and_json_that_reads_back() -> None:
    only = Verification(reader="r", simulated_by=None, examples=3, difference=0.0, limit=1e-4, network_difference=0.0)
    export = made(only)
    about = json.loads(json.dumps(export.to_json(), allow_nan=False))
    assert about["path"] == "nets/net.nir"
    assert about["about"]["inputs"] == [{"name": "input", "shape": [None, 3]}]
    page = export_page(about)
    assert "The metrics were taken" not in page
    assert "<dt>device: clock mhz</dt><dd>61.25</dd>" in page
    assert "<dt>exact</dt><dd>yes</dd>" in page
    assert "<dt>nothing</dt>" not in page


def test_metrics_are_those_of_a_reader_that_has_run_what_is_held_out_and_may_be_no_number() -> None:
    own = Verification(
        reader="a", simulated_by="apportion", examples=9,
        difference=0.0, limit=1e-4, network_difference=0.0,
        held_out=7,
        before={"accuracy": 0.75, "perplexity": float("inf")}, after={"accuracy": 0.5, "perplexity": float("nan")},
    )  # fmt: skip
    other = Verification(
        reader="b", simulated_by=None, examples=2, difference=1e-6, limit=1e-4, network_difference=1e-6
    )
    export = made(own, other)
    assert export.verification is own
    page = export_page(json.loads(json.dumps(export.to_json(), allow_nan=False)))
    for tile in ("accuracy of the net</dt><dd>0.75", "perplexity of the file</dt><dd>nan", "by</dt><dd>1e-06"):
        assert tile in page
