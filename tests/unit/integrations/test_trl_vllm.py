"""AQNCallback with use_vllm, against stand-ins for vLLM's LLM and for a server; tests/with_vllm has the real ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel, TrainerControl, TrainerState, TrainingArguments

from qerl import philox
from qerl.config import EMBEDDED
from qerl.engine.vllm.norms import find_norms
from qerl.engine.vllm.worker import PolicyWorker
from qerl.integrations.trl.callback import AQNCallback
from qerl.integrations.trl.rollout import EngineRollout
from qerl.integrations.trl.vllm import WORKER
from qerl.noise import NoiseDraw

pytest.importorskip("trl")

SEED, SIGMA = 3, 5e-2


class Worker:
    """What PolicyWorker finds: a model whose norms are, by name and by what they compute, vLLM's."""

    def __init__(self) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.bfloat16)
        self.model_config = SimpleNamespace(model=str(EMBEDDED))
        for name, norm in list(self.model.named_modules()):
            if type(norm).__name__ == "Qwen2RMSNorm":
                new = nn.RMSNorm(norm.weight.numel(), norm.variance_epsilon)
                new.weight = norm.weight
                self.model.set_submodule(name, new)

    def get_model(self) -> nn.Module:
        return self.model

    def weights(self) -> list[torch.Tensor]:
        return [norm.weight.detach().clone() for norm in find_norms(self.model).values()]


class LLM:
    """One process of a colocated vLLM."""

    def __init__(self) -> None:
        self.worker, self.log, self.seen = Worker(), [], list[list[torch.Tensor]]()
        self.cache_is_busy = False

    def collective_rpc(self, method: Any, args: tuple = ()) -> list[Any]:
        self.log.append(method.__name__)
        return [method(self.worker, *args)]

    def reset_prefix_cache(self) -> bool:
        self.log.append("reset")
        return not self.cache_is_busy

    def generate(self) -> str:
        self.log.append("generate")
        self.seen.append(self.worker.weights())
        return "completions"


class Client:
    """TRL's client of a server whose workers have the methods of `methods`."""

    base_url = "http://server"

    def __init__(self, methods: type) -> None:
        self.worker, self.methods, self.session = Worker(), methods, self
        self.seen: list[list[torch.Tensor]] = []
        self.resets = 0

    def post(self, url: str, json: dict[str, Any]) -> SimpleNamespace:
        assert url == "http://server/collective_rpc"
        method = getattr(self.methods, json["method"], None)
        if method is None:
            return SimpleNamespace(status_code=500)
        result = method(self.worker, *json["args"])
        return SimpleNamespace(status_code=200, json=lambda: {"results": [result]})

    def reset_prefix_cache(self) -> None:
        self.resets += 1

    def generate(self) -> None:
        self.seen.append(self.worker.weights())


def trainer(mode: str, *, process: int = 0, parallel: int = 1, **sampler: Any) -> SimpleNamespace:
    generation = SimpleNamespace(mode=mode, tensor_parallel_size=parallel, **sampler)
    return SimpleNamespace(vllm_generation=generation, accelerator=SimpleNamespace(process_index=process))


def begin(callback: AQNCallback, model: PreTrainedModel, step: int = 1) -> None:
    """What a trainer does up to the rollout of a step."""
    args = TrainingArguments("unused", use_cpu=True, seed=SEED)
    args.use_vllm = True
    state, control = TrainerState(max_steps=2, global_step=step), TrainerControl()
    callback.on_train_begin(args, state, control, model=model)
    callback.on_step_begin(args, state, control, model=model)
    model.train()


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32)


def expected(clean: list[torch.Tensor], group: int, stream: int = 0, step: int = 1) -> list[torch.Tensor]:
    draw = NoiseDraw(philox.fold(SEED, group), step, SIGMA)
    z = [draw.rows(site, torch.tensor([stream]), len(weight))[0] for site, weight in enumerate(clean)]
    return [(weight.float() + row).bfloat16() for weight, row in zip(clean, z, strict=True)]


def assert_equal(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_a_colocated_vllm_is_noisy_while_it_samples_and_no_longer(model: PreTrainedModel) -> None:
    llm = LLM()
    clean = llm.worker.weights()
    callback = AQNCallback(SIGMA, SIGMA, 2, trainer=trainer("colocate", llm=llm))
    before = [norm.weight.detach().clone() for norm in find_norms_of(model)]
    begin(callback, model)
    assert [llm.generate(), llm.generate()] == ["completions"] * 2
    assert_equal(llm.worker.weights(), clean)
    model.eval()
    llm.generate()  # an evaluation
    noise = ["qerl_add_noise", "reset", "generate", "qerl_remove_noise", "reset"]
    assert llm.log == [*noise, *noise, "generate"]
    assert_equal(llm.seen[0], expected(clean, 0))
    assert_equal(llm.seen[1], expected(clean, 0, stream=1))  # the second rollout of the step
    assert_equal(llm.seen[2], clean)
    assert callback.metrics["noise/sigma"] == SIGMA
    assert callback.metrics["noise/vectors"] == len(clean)
    assert callback.metrics["noise/relative"] > 0
    assert_equal([norm.weight.detach() for norm in find_norms_of(model)], before)
    callback.remove()
    assert "generate" not in vars(llm)


def find_norms_of(model: nn.Module) -> list[nn.Module]:
    return [module for name, module in model.named_modules() if name.endswith("layernorm")]


def test_what_fails_under_noise_leaves_none(model: PreTrainedModel) -> None:
    class Broken(LLM):
        def generate(self) -> str:
            raise OSError("gone")

    llm = Broken()
    clean = llm.worker.weights()
    callback = AQNCallback(SIGMA, SIGMA, 2, trainer=trainer("colocate", llm=llm))
    begin(callback, model)
    with pytest.raises(OSError, match="gone"):
        llm.generate()
    assert_equal(llm.worker.weights(), clean)
    callback.remove()
    llm = LLM()
    llm.cache_is_busy = True
    begin(AQNCallback(SIGMA, SIGMA, 2, trainer=trainer("colocate", llm=llm)), model)
    with pytest.raises(RuntimeError, match="prefix cache"):
        llm.generate()


def test_weights_that_come_late_and_go_early_meet_clean_norms(model: PreTrainedModel) -> None:
    """As TRL's own generate has it in vLLM's sleep mode: it puts weights back, samples, and discards them."""
    llm = LLM()
    clean = llm.worker.weights()
    norms = [norm.weight.data for norm in find_norms(llm.worker.model).values()]

    def generate_of_trl() -> None:
        for norm, weight in zip(norms, clean, strict=True):
            norm.copy_(weight)
        llm.generate()
        assert_equal(llm.worker.weights(), clean)
        for norm in norms:
            norm.fill_(torch.nan)

    callback = AQNCallback(SIGMA, SIGMA, 2, trainer=trainer("colocate", llm=llm))
    begin(callback, model)
    for stream in range(2):
        generate_of_trl()
        assert_equal(llm.seen[stream], expected(clean, 0, stream))
        assert all(norm.isnan().all() for norm in norms)  # nothing was written into what sleeps
    callback.remove()


def test_processes_that_run_one_model_draw_the_same_noise(model: PreTrainedModel) -> None:
    seen = []
    for process in range(4):
        llm = LLM()
        callback = AQNCallback(SIGMA, SIGMA, 2, trainer=trainer("colocate", process=process, parallel=2, llm=llm))
        begin(callback, model)
        llm.generate()
        seen.append(llm.seen[0])
        callback.remove()
    for group, process in ((0, 0), (0, 1), (1, 2), (1, 3)):
        assert_equal(seen[process], expected(llm.worker.weights(), group))


def test_a_server_is_noisy_by_its_workers_methods(model: PreTrainedModel) -> None:
    client = Client(PolicyWorker)
    clean = client.worker.weights()
    callback = AQNCallback(SIGMA, SIGMA, 2, trainer=trainer("server", vllm_client=client))
    begin(callback, model)
    client.generate()
    assert client.resets == 2
    assert_equal(client.seen[0], expected(clean, 0))
    assert_equal(client.worker.weights(), clean)
    callback.remove()
    client.generate()
    assert_equal(client.seen[1], clean)


def test_a_server_without_the_methods_is_told_how_to_start(model: PreTrainedModel) -> None:
    client = Client(object)
    begin(AQNCallback(SIGMA, SIGMA, 2, trainer=trainer("server", vllm_client=client)), model)
    with pytest.raises(RuntimeError, match=rf"--worker-extension-cls {WORKER}"):
        client.generate()
    assert WORKER == "qerl.engine.vllm.worker.PolicyWorker"


def test_a_process_that_another_samples_for_waits(model: PreTrainedModel) -> None:
    callback = AQNCallback(SIGMA, SIGMA, 2, trainer=trainer("server", process=1))
    begin(callback, model)
    args = TrainingArguments("unused", use_cpu=True)
    callback.on_step_end(args, TrainerState(), TrainerControl())  # no complaint that nothing was sampled here
    callback.remove()


def test_norms_that_vllm_lacks_are_an_error(model: PreTrainedModel) -> None:
    llm = LLM()
    del llm.worker.model.model.layers[3]
    begin(AQNCallback(SIGMA, SIGMA, 2, trainer=trainer("colocate", llm=llm)), model)
    with pytest.raises(RuntimeError, match="6 norms of vLLM's model took noise, and the trainer's has 8"):
        llm.generate()


def test_noise_that_bf16_cannot_hold_is_told_once(model: PreTrainedModel, caplog: pytest.LogCaptureFixture) -> None:
    llm = LLM()
    callback = AQNCallback(1e-5, 1e-5, 2, trainer=trainer("colocate", llm=llm))
    begin(callback, model)
    llm.generate()
    llm.generate()
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["AQNCallback"]
    assert "below what vLLM's norms hold" in caplog.text
    callback.remove()


def test_without_the_trainer_it_says_how_to_give_it(model: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match=r"trainer\.add_callback\(AQNCallback\(\.\.\., trainer=trainer\)\)"):
        begin(AQNCallback(), model)
    with pytest.raises(ValueError, match="TRL has vLLM itself"):
        EngineRollout(rollout={"engine": "vllm"})
