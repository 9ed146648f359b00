"""What all tests share."""

import os

import pytest

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as `qerl` sets it, before torch is loaded


@pytest.fixture
def compressed_tensors_alone(monkeypatch):
    """transformers opens packed folders with compressed-tensors, as if qerl.integrations.transformers were not there.

    Any test may have imported that before, and others need what it registered: so it is undone for a test that asks.
    """
    from transformers import CompressedTensorsConfig
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    monkeypatch.setitem(AUTO_QUANTIZATION_CONFIG_MAPPING, "compressed-tensors", CompressedTensorsConfig)
