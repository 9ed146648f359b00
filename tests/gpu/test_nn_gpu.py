"""The model's parts on a GPU: 16-bit paths against fp32, and numbers that must not depend on the device."""

from __future__ import annotations

import pytest
import torch

from qerl.config import LoraConfig, ModelConfig
from qerl.formats import nf4
from qerl.kernels.coded import CodedWeight, coded_product, dequantize_by_bitsandbytes
from qerl.nn.attention import Packing, attend_packed, packed_forward
from qerl.nn.head import token_logprobs
from qerl.nn.linear import PackedLinear
from qerl.nn.load import load_model
from qerl.nn.lora import attach_lora
from qerl.nn.recompute import recompute_layers
from qerl.nn.rmsnorm import rms_norm
from qerl.nn.structure import decoder_layers, head

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

LENGTHS = (70, 1, 200, 33)
ENDS = torch.tensor([0, *LENGTHS]).cumsum(0).int()


def close(actual, expected, tolerance):
    """Relative error in the norm: single elements of a 16-bit product near zero have none worth asking for."""
    assert (actual.float() - expected.float()).norm() < tolerance * expected.float().norm()


@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("heads", [(8, 8), (8, 2)])
def test_varlen_attention_is_sdpa_of_each_sequence(heads, window):
    generator = torch.Generator("cuda").manual_seed(0)
    packing = Packing(ENDS.cuda(), LENGTHS)
    shapes = [(count, sum(LENGTHS), 64) for count in (heads[0], heads[1], heads[1])]
    inputs = [torch.randn(shape, device="cuda", generator=generator).bfloat16().requires_grad_() for shape in shapes]
    exact = [x.detach().float().requires_grad_() for x in inputs]  # fp32 goes sequence by sequence
    output, expected = (attend_packed(*parts, packing, window=window) for parts in (inputs, exact))
    close(output, expected, 1e-2)
    grad = torch.randn(expected.shape, device="cuda", generator=generator)
    actual = torch.autograd.grad(output, inputs, grad.bfloat16())
    for a, e in zip(actual, torch.autograd.grad(expected, exact, grad), strict=True):
        close(a, e, 2e-2)


def test_varlen_sequences_never_see_each_other():
    q = torch.randn(4, sum(LENGTHS), 64, device="cuda").bfloat16()
    changed = q.clone()
    changed[:, :70] = 0
    packing = Packing(ENDS.cuda(), LENGTHS)
    assert torch.equal(attend_packed(q, q, q, packing)[70:], attend_packed(changed, changed, changed, packing)[70:])


def embedded(device="cuda", dtype="auto"):
    model, _ = load_model(ModelConfig(device=device, dtype=dtype))
    return attach_lora(model, LoraConfig(r=8), seed=3)


def tokens(model, device="cuda"):
    vocabulary = head(model).weight.shape[0]
    return torch.randint(vocabulary, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0)).to(device)


def test_adapters_start_the_same_on_any_device():
    there = {name: p for name, p in embedded().named_parameters() if "lora_" in name}
    for name, parameter in embedded("cpu").named_parameters():
        if "lora_" in name:
            assert torch.equal(parameter, there[name].cpu()) and there[name].dtype == torch.float32


def test_codes_are_the_same_on_any_device():
    here, there = decoder_layers(embedded("cpu")), decoder_layers(embedded())
    for name, module in here.named_modules():
        if isinstance(module, PackedLinear):
            assert torch.equal(module.packed.tiles, there.get_submodule(name).packed.tiles.cpu())


@torch.no_grad()
def test_bf16_forward_is_near_fp32_on_the_cpu():
    here, there = embedded("cpu"), embedded()
    ids = tokens(here, "cpu")
    exact = packed_forward(here, ids, ENDS)
    hidden = packed_forward(there, ids.cuda(), ENDS.cuda())
    assert hidden.dtype == torch.bfloat16
    close(hidden.cpu(), exact, 2e-2)
    expected, expected_entropy = token_logprobs(exact, head(here).weight, ids.roll(-1))
    logprobs, entropy = token_logprobs(hidden, head(there).weight, ids.roll(-1).cuda(), chunk=64)
    assert (logprobs.cpu() - expected).abs().mean() < 0.1 and (entropy.cpu() - expected_entropy).abs().mean() < 0.1


def test_recomputation_gives_the_same_gradients_and_less_memory():
    results = []
    for recompute in (False, True):
        model = embedded()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.fill_(0.01)
        if recompute:
            recompute_layers(model)
        ids = tokens(model)
        before = torch.cuda.memory_allocated()
        hidden = packed_forward(model, ids, ENDS)
        kept = torch.cuda.memory_allocated() - before
        hidden.float().square().sum().backward()
        results.append((kept, {n: p.grad for n, p in model.named_parameters() if p.requires_grad}))
    (kept, expected), (less, actual) = results
    assert less < 0.5 * kept
    for name, gradient in expected.items():
        assert gradient.abs().sum() > 0
        close(actual[name], gradient, 2e-2)  # flash attention's backward adds in no fixed order


def test_gradients_of_the_fused_kernels_in_bf16_are_near_fp32_on_the_cpu():
    """Norms, rotation, attention, SwiGLU, adapters and head, forth and back: a wrong sign in one shows everywhere."""
    gradients = []
    for device in ("cpu", "cuda"):
        model = embedded(device)
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
        recompute_layers(model)
        ids = tokens(model, device)
        hidden = packed_forward(model, ids, ENDS)
        logprobs, _ = token_logprobs(hidden, head(model).weight, ids.roll(-1), chunk=64)
        (logprobs * torch.randn(len(ids), generator=generator).to(device)).sum().backward()
        gradients.append({n: p.grad.cpu() for n, p in model.named_parameters() if p.requires_grad})
    for part in ("lora_A", "lora_B"):
        here, there = (torch.cat([g.flatten() for n, g in of.items() if part in n]) for of in gradients)
        close(there, here, 0.1)


def test_a_packed_linear_moves_and_multiplies():
    model, _ = load_model(ModelConfig(device="cpu", dtype="bfloat16"))
    linear = decoder_layers(model)[0].mlp.down_proj
    x = torch.randn(50, linear.in_features).bfloat16().requires_grad_()
    grad = torch.randn(50, linear.out_features).bfloat16()
    expected = linear(x)
    (expected_grad,) = torch.autograd.grad(expected, x, grad)
    model.cuda()
    assert linear.weight.is_cuda and linear.packed.device.type == "cuda"
    there = x.detach().cuda().requires_grad_()
    output = linear(there)
    close(output.cpu(), expected, 5e-3)
    close(torch.autograd.grad(output, there, grad.cuda())[0].cpu(), expected_grad, 5e-3)


@pytest.mark.parametrize("double_quant", [False, True])
def test_bitsandbytes_dequantises_nf4_to_the_same_bits(double_quant):
    pytest.importorskip("bitsandbytes")
    codes = nf4.quantize(torch.randn(192, 256, device="cuda"), double_quant=double_quant)
    out = torch.full((256, 256), torch.nan, device="cuda", dtype=torch.bfloat16)
    dequantize_by_bitsandbytes(codes, out[32:224])  # rows of a scratch buffer
    assert torch.equal(out[32:224], nf4.dequantize(codes, torch.bfloat16))
    assert out[:32].isnan().all() and out[224:].isnan().all()


@pytest.mark.parametrize("tokens", [8, 64, 65])
def test_products_of_nf4_are_those_of_the_dense_matrix(tokens):
    pytest.importorskip("bitsandbytes")
    weights = [CodedWeight(nf4.quantize(torch.randn(n, 512, device="cuda"))) for n in (256, 1024)]
    x = torch.randn(tokens, 512, device="cuda").bfloat16()
    dense = torch.cat([nf4.dequantize(w.codes) for w in weights])
    close(coded_product(x, weights), x.float() @ dense.float().T, 1e-2)


def test_offloaded_activations_give_the_same_gradients_and_less_memory():
    results = []
    for offload in (False, True):
        model = embedded()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.fill_(0.01)
        recompute_layers(model, offload=offload)
        ids = tokens(model)
        before = torch.cuda.memory_allocated()
        hidden = packed_forward(model, ids, ENDS)
        torch.cuda.synchronize()
        kept = torch.cuda.memory_allocated() - before
        hidden.float().square().sum().backward()
        results.append((kept, {n: p.grad for n, p in model.named_parameters() if p.requires_grad}))
    (kept, expected), (less, actual) = results
    assert less < kept
    for name, gradient in expected.items():
        close(actual[name], gradient, 2e-2)


def test_norm_and_head_in_bf16():
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(40, 128, generator=generator).bfloat16(), torch.rand(128, generator=generator) + 0.5
    close(rms_norm(x.cuda(), weight.cuda(), 1e-6).cpu(), rms_norm(x.float(), weight, 1e-6), 3e-3)
    vocabulary = (torch.randn(1000, 128, generator=generator) / 4).bfloat16()
    targets = torch.randint(1000, (40,), generator=generator)
    here = x.detach().float().requires_grad_()
    there = x.detach().cuda().requires_grad_()
    expected, _ = token_logprobs(here, vocabulary.float(), targets)
    logprobs, _ = token_logprobs(there, vocabulary.cuda(), targets.cuda(), chunk=16)
    close(logprobs.cpu(), expected, 1e-2)
    (actual,) = torch.autograd.grad(logprobs.sum(), there)
    close(actual.cpu(), torch.autograd.grad(expected.sum(), here)[0], 2e-2)
