"""Quantised weights as they lie in the engine's memory: packed values, scales, zeros, and the memory of repacking and
of a product.

Followed from vllm 0.32.0, ``layers/quantization`` (auto_awq, auto_gptq, compressed_tensors, fp8, online) and
``kernels/linear``. Heads and embeddings stay as they are, and so do modules that the configuration excludes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from graphmem.base import packed_products
from graphmem.base.documents import shown
from graphmem.base.versions import Version
from graphmem.devices.capabilities import reaches
from graphmem.errors import UsageError
from graphmem.serving.base import Question, ServedModel
from graphmem.serving.values import as_object, counted, mapping, matches
from graphmem.serving.vllm import versions
from graphmem.serving.vllm.layers import CacheScales, LinearMethod, Unquantized, WeightMethod, cdiv
from graphmem.serving.vllm.marlin import machete_product, marlin_product
from graphmem.serving.vllm.run import Run, Tensor

#: What Machete takes: values of a group, and the least parts of a weight (layers/quantization/utils/machete_utils.py).
_MACHETE_GROUPS, _MACHETE_BLOCK = (-1, 64, 128), (64, 128)
#: Values of a block that bitsandbytes scales together (``blocksize`` of its 4-bit types).
_NF4_BLOCK = 64
#: Scales that it quantises together (``quantize_4bit`` with ``compress_statistics``).
_NF4_NESTED = 256
#: Rows that scales of experts are filled up to multiples of on Hopper, for eight warps (``HopperMXScaleLayout``).
_SCALE_ROWS, _SCALE_COLUMNS = 256, 4
#: The tensors that ``swizzle_data`` (tensor_details/layout_details/hopper_value.py) makes of values and, by a minus,
#: lets go, each as large as these, capitals a quarter; the last stays. Those of scales (hopper_scale.py): of their
#: padded columns, capitals of rows too.
_VALUES_ON_HOPPER = (
    "ab-aacd-cce-cc-d-e-aAd-Aae-aaf-aa-e-f-dd-aa-c-dcde-ddf-dd-e-f-cCe-Ccf-ccg-cc-f-g-ee-cc-d-edef-eeg-ee-f-g-dDf-Dd"
    "g-ddh-dd-g-h-ff-dd-e-fefg-ffh-ff-g-hgh-gg-f-h-eEf-Eeh-eei-ee-h-ihi-hh-e-i-fe-hf-g-eeg-ee-ggh-gg-e-he-g-a-c-d-f-b"
)
_SCALES_ON_HOPPER = "bc-bD-cE-D"
#: Rows from which AWQ's own kernels unpack the weight (``FP16_MATMUL_HEURISTIC_CONDITION``, awq.py of 0.22).
_LONG_PRODUCT = 256
#: Bytes of the list by which Marlin's scales are put in order (``get_scale_perms``, marlin_utils.py); biases' is half.
_ORDER = 64 * 8
#: What a method takes where nobody says: bits, values of a group.
_USUAL = (4, 128)
#: What CUTLASS's kernels of eight bits want rows and columns to be multiples of.
_ALIGNMENT = 16


@dataclass(frozen=True)
class Packed(WeightMethod):
    """Integers of a few bits in 32-bit words with 16-bit scales of groups, multiplied by Marlin, on Hopper by Machete.

    ``reorders``: the checkpoint's order of bits is AWQ's, and every layer is unpacked to 32 bits to put it right.
    ``unpacks``: AWQ's own kernels instead, which leave weights as they are and unpack them for a long product.
    ``zeros``: groups have zero points; ``drops_zeros``: the checkpoint has them, and they are let go. ``hopper``:
    Machete multiplies what it can, and keeps zero points in 16 bits, times the scales (mixed_precision/machete.py).
    """

    of_experts = ("qweight", "scales", "qzeros")

    bits: int
    group: int
    itemsize: int
    reorders: bool = False
    zeros: bool = False
    drops_zeros: bool = False
    shape_tensor: bool = False
    unpacks: bool = False
    hopper: bool = False

    def _by_machete(self, inputs: int, columns: int) -> bool:
        rows, wide = _MACHETE_BLOCK
        return self.hopper and self.group in _MACHETE_GROUPS and not (inputs % rows or columns % wide)

    def _groups(self, inputs: int) -> int:
        return 1 if self.group < 0 else cdiv(inputs, self.group)

    def tensors(self, inputs: int, outputs: Sequence[int]) -> dict[str, int]:
        columns, groups = sum(outputs), self._groups(inputs) * sum(outputs)
        values, scales = {"qweight": inputs * columns * self.bits // 8}, {"scales": groups * self.itemsize}
        zeros = {"qzeros": groups * self.bits // 8} if self.zeros or self.drops_zeros else {}
        if self.shape_tensor:
            return values | scales | zeros | {"weight_shape": 16}
        return values | zeros | scales

    def finish(self, run: Run, inputs: int, outputs: list[int], name: str) -> None:
        """Marlin's order: zeros, values and scales are each made anew, and then the old ones let go. Machete's: values
        twice, and zeros."""
        if self.unpacks:
            return
        run.enter(f"{name}.repack")
        columns = sum(outputs)
        if self.reorders:
            order, shifts = run.new(64), run.new(8 * 4)
            self._reorder(run, f"{name}.qweight", inputs * columns * 4)
            if self.zeros:
                self._reorder(run, f"{name}.qzeros", self._groups(inputs) * columns * 4)
            run.free(order, shifts)
        dropped = [f"{name}.qzeros"] if self.drops_zeros and not self.zeros else []
        if self._by_machete(inputs, columns):
            turned = run.new(run.named[f"{name}.qweight"].bytes)
            _replace(run, f"{name}.qweight")
            run.free(turned)
            if self.zeros:
                values = self._groups(inputs) * columns
                product = run.replacing(run.new(values * 4), run.new(values * self.itemsize))
                scaled = run.new(values * self.itemsize, f"{name}.qzeros")
                run.named[f"{name}.qzeros"] = run.replacing(product, run.named[f"{name}.qzeros"], scaled)
            return
        if self.zeros:
            wide = self._groups(inputs) * columns * 4
            unpacked = run.new(wide)
            for _ in range(2):  # put in order, and then by eight (``marlin_zero_points``, marlin_utils.py)
                unpacked = run.replacing(run.new(_ORDER), unpacked, run.new(wide))
            _replace(run, f"{name}.qzeros", after=[unpacked])
        for part, indices in (("qweight", 0), ("scales", _ORDER)):
            # compressed-tensors' lie the other way, and are turned around first
            copies = [run.new(run.named[f"{name}.{part}"].bytes)] if self.shape_tensor else []
            _replace(run, f"{name}.{part}", after=copies, order=indices)
        _order_bias(run, name)
        run.free(*[run.named.pop(one) for one in dropped])  # held to the end by ``device_loading_context``

    def _reorder(self, run: Run, name: str, wide: int) -> None:
        """``_convert_awq_to_standard_format``: shifted, masked, put in order, shifted again, and summed up."""
        masked = run.replacing(run.new(wide), run.new(wide))
        ordered = run.replacing(masked, run.new(wide))
        again, before = run.new(wide), run.named[name]
        run.named[name] = run.replacing(again, ordered, before, run.new(before.bytes, name))

    def apply(self, run: Run, tokens: int, inputs: int, outputs: int) -> Tensor:
        size = outputs * self.itemsize * tokens
        if not self.unpacks:
            machete = self._by_machete(inputs, outputs)
            return machete_product(run, tokens, inputs, outputs, size) if machete else marlin_product(run, tokens, size)
        if tokens < _LONG_PRODUCT:
            return run.new(size)
        unpacked = run.new(inputs * outputs * self.itemsize, "unpacked weight")
        return run.replacing(unpacked, run.matmul(size))

    @property
    def by_marlin(self) -> bool:
        return not self.unpacks

    def make_experts(self, run: Run, name: str, count: int, hidden: int, width: int, parts: int = 2) -> list[Tensor]:
        """GPTQ's have biases besides, which are let go where the checkpoint has none."""
        made = super().make_experts(run, name, count, hidden, width, parts)
        for part, columns in (("w13", parts * width), ("w2", hidden)) if self.drops_zeros else ():
            label = f"{name}.{part}_bias"
            run.named[label] = run.new(count * columns * self.itemsize, label)
        return made

    def finish_experts(self, run: Run, name: str, count: int) -> None:
        """``_process_weights_marlin``, ``_process_awq_weights_marlin`` (fused_moe/oracle/int_wna16.py): all parts are
        made anew, expert by expert, and then the old ones let go. Zero points are unpacked to 32 bits on the way.
        GPTQ's are turned around before it, and back within (``AutoGPTQMoEMethod``); compressed-tensors' are turned."""
        parts = [f"{name}.{part}_{one}" for one in ("qweight", "scales", "qzeros") for part in ("w13", "w2")]
        parts = [one for one in parts if one in run.named]
        sizes = [run.named[one].bytes for one in parts]
        turns = 2 * self.drops_zeros or int(self.shape_tensor)
        turned = [run.new(size) for _ in range(turns) for size in sizes]
        made = [self._repacked_experts(run, *one, count) for one in zip(parts, sizes, strict=True)]
        run.free(*reversed(turned))
        for one, new in zip(parts, made, strict=True):
            run.free(run.named[one])
            run.named[one] = new
        if self.drops_zeros:
            run.free(*[run.named.pop(f"{name}.{part}_bias") for part in ("w13", "w2")])

    def _repacked_experts(self, run: Run, name: str, size: int, count: int) -> Tensor:
        """One part of so many experts."""
        new, each = run.new(size, name), size // count
        if name.endswith("qzeros"):
            run.temporary(*[each * 32 // self.bits] * 3)
        run.temporary(each)
        return new


@dataclass(frozen=True)
class Float8(WeightMethod):
    """Eight-bit floating point with scales in fp32: of the whole (``block`` 0), of every output (-1), or of blocks.

    ``online``: the checkpoint has 16 bits, and every layer is quantised when it has been loaded. ``native``: the card
    multiplies it, and inputs are quantised too; else Marlin does.
    """

    of_experts = ("weight", "weight_scale")

    itemsize: int
    block: int = 0
    online: bool = False
    native: bool = True
    static_inputs: bool = False
    #: Whether the card multiplies eight bits of experts, whatever it does with layers.
    narrows: bool = True
    #: Whether experts may be multiplied by CUTLASS (``allow_vllm_cutlass``).
    grouped: bool = False
    #: Whether they are integers, which lie as they do.
    integers: bool = False

    def tensors(self, inputs: int, outputs: Sequence[int]) -> dict[str, int]:
        columns, parts = sum(outputs), len(outputs)
        blocks = cdiv(columns, self.block) * cdiv(inputs, self.block) if self.block > 0 else 0
        scales = blocks or (columns if self.block < 0 else parts)
        found = {"weight": inputs * columns, "weight_scale": scales * 4}
        return found | {"input_scale": parts * 4} if self.static_inputs else found

    @property
    def by_cutlass(self) -> bool:
        return self.grouped and self.native and self.block <= 0

    @property
    def tile(self) -> int:
        return 64 if self.block > 0 else super().tile

    def narrowed(self, rows: int, width: int) -> list[int]:
        return [rows * width, self._scales(rows, width)] if self.narrows else []

    def _scales(self, rows: int, width: int) -> int:
        """Bytes of the scales of so many rows."""
        return rows * 4 if self.block < 0 else rows * cdiv(width, self.block) * 4 if self.block else 4

    def scales_of_rows(self) -> int | None:
        """Of scales that are known, or made of one row: the kernel before quantises (``QuantFP8.forward_native``)."""
        if not self.native or self.online or self.block > 0:
            return None
        return 0 if self.static_inputs else 4 if self.block < 0 else None

    def make(self, run: Run, inputs: int, outputs: list[int], name: str) -> None:
        if not self.online:  # else on the meta device until the layer has been loaded
            super().make(run, inputs, outputs, name)

    def finish(self, run: Run, inputs: int, outputs: list[int], name: str) -> None:
        run.enter(f"{name}.quantize")
        columns, loaded = sum(outputs), []
        if self.online:
            loaded = [run.new(inputs * columns * self.itemsize, f"{name}.weight in 16 bits")]
            run.named[f"{name}.weight_scale"] = run.new(4, f"{name}.weight_scale")
            run.named[f"{name}.weight"] = run.new(inputs * columns, f"{name}.weight")
        if not self.native:
            self._prepare_for_marlin(run, name, inputs, outputs)
        elif not self.block and _aligned(inputs) * _aligned(columns) != inputs * columns:
            padded = run.new(_aligned(inputs) * _aligned(columns), f"{name}.weight")
            run.named[f"{name}.weight"] = run.replacing(run.named[f"{name}.weight"], padded)
        run.free(*loaded)

    def _prepare_for_marlin(self, run: Run, name: str, inputs: int, outputs: list[int]) -> None:
        """``prepare_fp8_layer_for_marlin`` (quantization/utils/marlin_utils_fp8.py): the weight is turned and packed;
        scales are written out for every output in 16 bits, put in order, and scaled once more. Who called it holds
        what was there before of blocks, and of weights that the engine quantised."""
        columns, groups = sum(outputs), cdiv(inputs, self.block) if self.block > 0 else 1
        weight, scale = (run.named[f"{name}.{part}"] for part in ("weight", "weight_scale"))
        size, held = groups * columns * self.itemsize, [scale]
        if self.static_inputs:
            run.free(run.named.pop(f"{name}.input_scale"))
        turned = run.new(weight.bytes)
        run.named[f"{name}.weight"] = run.new(weight.bytes, f"{name}.weight")
        if self.block > 0 or self.online:
            held.append(weight)
        else:
            run.free(weight)
        narrow = [] if self.block else [run.new(scale.bytes // 2)]
        if narrow and len(outputs) > 1 and not self.online:  # as often as each part has outputs
            narrow += [run.new(len(outputs) * 8), run.new(columns * 8)]
        wide = run.replacing(*narrow, run.new(size))
        ordered = run.replacing(run.new(_ORDER // 2), run.new(size))
        biased = run.new(size)
        for _ in range(2):
            biased = run.replacing(biased, run.new(size))
        run.named[f"{name}.weight_scale"] = run.replacing(biased, run.new(size, f"{name}.weight_scale"))
        run.free(ordered, turned, wide, *held)
        _order_bias(run, name)

    def apply(self, run: Run, tokens: int, inputs: int, outputs: int) -> Tensor:
        size = tokens * outputs * self.itemsize
        if not self.native:
            return marlin_product(run, tokens, size)
        by_rows = not self.block and not self.static_inputs  # (``kFp8DynamicTokenSym``)
        scales = tokens * 4 if by_rows else self._scales(tokens, inputs)
        held = [run.new(tokens * inputs, "quantised input"), run.new(scales, "its scales")]
        if not self.block and _aligned(inputs) != inputs:
            held.append(run.new(tokens * _aligned(inputs), "padded input"))
        if not self.block and _aligned(outputs) != outputs:
            held.append(run.new(tokens * _aligned(outputs) * self.itemsize, "padded output"))
        return run.replacing(*held, self.multiply(run, tokens, inputs, outputs))

    def multiply(self, run: Run, tokens: int, inputs: int, outputs: int) -> Tensor:
        result = run.new(tokens * outputs * self.itemsize)
        self.share_sums(run, tokens, outputs)
        return result

    def narrow_inputs(self, tokens: int, width: int) -> list[int]:
        return [tokens * width] if self.static_inputs and self.native and not width % _ALIGNMENT else []

    def share_sums(self, run: Run, tokens: int, outputs: int) -> None:
        """CUTLASS's kernels for cards before Hopper; none by blocks."""
        capability = run.device.capability
        if self.native and self.block <= 0 and not reaches(capability, _NATIVE_FP8_BLOCKS):
            by_width = reaches(capability, _NATIVE_FP8)
            run.temporary(packed_products.cutlass_bytes(tokens, outputs, integers=self.integers, by_width=by_width))


def _through(run: Run, steps: str, size: int, other: int) -> Tensor:
    """What is left of tensors of one size and, in capitals, of the other, that are made and let go in these steps."""
    alive: dict[str, Tensor] = {}
    for step in re.findall("-?.", steps):
        if step[0] == "-":
            run.free(alive.pop(step[1]))
        else:
            alive[step] = run.new(other if step.isupper() else size)
    (left,) = alive.values()
    return left


def _aligned(width: int) -> int:
    """Rows and columns as CUTLASS multiplies them (``_pad_to_alignment``, kernels/linear/scaled_mm/cutlass.py)."""
    return cdiv(width, _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True)
class Float4(WeightMethod):
    """Four-bit floating point: bitsandbytes' nf4 and fp4 (blocks of 64 with fp32), nvfp4 (16, 8 bits), mxfp4 (32, 8).

    ``unpacks``: a product unpacks the whole weight first (bitsandbytes). ``padded_experts``: experts' are padded for
    Marlin; ``sorted_experts``: triton_kernels multiply them. ``nested``: so many scales are quantised together to a
    byte each with one in fp32 (bitsandbytes' ``compress_statistics``), and unpacked for a product too.
    """

    of_experts = ("weight", "scale")

    itemsize: int
    block: int
    scale_bytes: int
    unpacks: bool = False
    native: bool = False
    nested: int = 0
    padded_experts: bool = False
    sorted_experts: bool = False

    def tensors(self, inputs: int, outputs: Sequence[int]) -> dict[str, int]:
        values = inputs * sum(outputs)
        scales = cdiv(values, self.block)
        found = {"weight": values // 2, "scale": scales * (1 if self.nested else self.scale_bytes)}
        return found | ({"scale_of_scales": cdiv(scales, self.nested) * self.scale_bytes} if self.nested else {})

    def make_experts(self, run: Run, name: str, count: int, hidden: int, width: int, parts: int = 2) -> list[Tensor]:
        """Scales of experts are unpacked."""
        return WeightMethod.make_experts(replace(self, nested=0), run, name, count, hidden, width, parts)

    def finish(self, run: Run, inputs: int, outputs: list[int], name: str) -> None:
        if not self.unpacks:
            run.enter(f"{name}.repack")
            _replace(run, f"{name}.weight", f"{name}.scale")

    @property
    def by_marlin(self) -> bool:
        return self.padded_experts

    @property
    def by_triton(self) -> bool:
        return self.sorted_experts

    def padded(self, hidden: int, width: int) -> tuple[int, int]:
        """``mxfp4_round_up_hidden_size_and_intermediate_size`` (fused_moe/oracle/mxfp4.py)."""
        return (cdiv(hidden, 256) * 256, cdiv(width, 128) * 128) if self.padded_experts else (hidden, width)

    def finish_experts(self, run: Run, name: str, count: int) -> None:
        """``prepare_moe_mxfp4_layer_for_marlin``, and NVFP4's (quantization/utils/marlin_utils_fp4.py): all parts are
        made anew, and then the old ones let go; scales are 16 bits wide on the way."""
        if self.sorted_experts:
            self._swizzle(run, name, count)
        if not self.by_marlin:
            return
        made = {}
        for part in ("w13", "w2"):
            label = f"{name}.{part}_weight"
            each, size = run.named[label].bytes // count, run.named[label].bytes
            turned, packed = run.new(each), run.new(each)
            made[label] = run.new(size, label)
            for _ in range(count - 1):  # each is made while its name still holds the one before
                turned, packed = run.replacing(turned, run.new(each)), run.replacing(packed, run.new(each))
            run.free(turned, packed)
        for part in ("w13", "w2"):
            label = f"{name}.{part}_scale"
            size = run.named[label].bytes
            wide, each = run.new(2 * size), size // count
            own = []
            for _ in range(count):
                own.append(run.replacing(run.replacing(run.new(2 * each), run.new(2 * each)), run.new(each)))
            made[label] = run.new(size, label)
            run.free(*own, wide)
        for part in ("w13", "w2"):
            label = f"{name}.{part}_bias"
            if label in run.named:
                size = run.named[label].bytes
                own = [run.new(size // count) for _ in range(count)]
                made[label] = run.new(size, label)
                run.free(*own)
        for label, new in made.items():
            run.free(run.named[label])
            run.named[label] = new

    def _swizzle(self, run: Run, name: str, count: int) -> None:
        """Biases in fp32; values in the kernels' order; scales too, whose rows are filled up (``_swizzle_mxfp4``,
        quantization/utils/mxfp4_utils.py)."""
        labels = [f"{name}.{part}_" for part in ("w13", "w2")]
        rows = [run.named[f"{label}bias"].bytes // (count * self.itemsize) for label in labels]
        made = {}
        for label, own in zip(labels, rows, strict=True):
            made[f"{label}bias"] = run.new(count * own * 4, f"{label}bias")
        for label, own in zip(labels, rows, strict=True):
            values = run.named[f"{label}weight"].bytes
            columns = cdiv(run.named[f"{label}scale"].bytes // (count * own), _SCALE_COLUMNS) * _SCALE_COLUMNS
            padded = run.new(count * columns * own)
            made[f"{label}weight"] = _through(run, _VALUES_ON_HOPPER, values, values // 4)
            whole = count * columns * cdiv(own, _SCALE_ROWS) * _SCALE_ROWS
            made[f"{label}scale"] = _through(run, _SCALES_ON_HOPPER, padded.bytes, whole)
            run.free(padded)
        for label, new in made.items():
            run.free(run.named[label])
            run.named[label] = new

    def apply(self, run: Run, tokens: int, inputs: int, outputs: int) -> Tensor:
        size, values = tokens * outputs * self.itemsize, inputs * outputs
        if self.unpacks:
            result = run.new(size)
            scales = [run.new(cdiv(values, self.block) * self.scale_bytes)] if self.nested else []
            unpacked = run.new(values * self.itemsize, "unpacked weight")
            run.free(run.matmul(size), unpacked, *scales)
            return result
        if not self.native:
            return marlin_product(run, tokens, size)
        return run.replacing(run.new(tokens * inputs // 2), run.new(tokens * cdiv(inputs, self.block)), run.new(size))


@dataclass(frozen=True)
class NvFloat4(Float4):
    """NVFP4: a scale in eight bits for 16 values, and one of the whole (modelopt.py, schemes/
    compressed_tensors_w4a4_nvfp4.py, kernels/linear/nvfp4). ``inputs``: they are quantised too, if the card multiplies
    four bits. ``divisors``: the scales of the whole are kept as compressed-tensors has them."""

    inputs: bool = True
    divisors: bool = False

    @property
    def in_four_bits(self) -> bool:
        return self.native

    @property
    def by_marlin(self) -> bool:
        return not self.native

    def make_experts(self, run: Run, name: str, count: int, hidden: int, width: int, parts: int = 2) -> list[Tensor]:
        """With scales of the whole, of weights and of inputs."""
        made = super().make_experts(run, name, count, hidden, width, parts)
        return [*made, *(run.new(count * one * 4, f"{name}.whole scales") for one in (parts, 1, parts, 1))]

    def tensors(self, inputs: int, outputs: Sequence[int]) -> dict[str, int]:
        values, whole = inputs * sum(outputs), len(outputs) * 4
        found = {"weight": values // 2, "whole_scale": whole, "scale": values // self.block}
        return found | ({"input_scale": whole} if self.inputs else {})

    def finish(self, run: Run, inputs: int, outputs: list[int], name: str) -> None:
        run.enter(f"{name}.repack")
        scales = run.named[f"{name}.scale"].bytes
        if not self.divisors:  # whether all were loaded
            run.temporary(4 * scales, scales)
        held = [run.new(4)] if self.divisors else []
        _replace(run, f"{name}.whole_scale")
        if self.inputs:  # with its inverse, and its product with the weight's
            _replace(run, f"{name}.input_scale")
            run.new(4, f"{name}.inverse")
            run.new(4, f"{name}.alpha")
        if self.native:
            self._swizzle_scales(run, inputs, sum(outputs), name)
        else:
            self._prepare_for_marlin(run, name, scales)
        run.free(*held)

    @staticmethod
    def _swizzle_scales(run: Run, inputs: int, columns: int, name: str) -> None:
        """``swizzle_blockscale``, ``pad_nvfp4_weight_for_cutlass`` (quantization/utils/nvfp4_utils.py)."""
        padded = run.new(_swizzled(columns, inputs))
        run.named[f"{name}.scale"] = run.replacing(
            padded, run.named[f"{name}.scale"], run.new(padded.bytes, f"{name}.scale")
        )
        rows, width = (cdiv(size, _FP4_ALIGNMENT) * _FP4_ALIGNMENT for size in (columns, inputs))
        for size in {rows * inputs // 2, rows * width // 2} - {columns * inputs // 2}:
            run.named[f"{name}.weight"] = run.replacing(run.named[f"{name}.weight"], run.new(size, f"{name}.weight"))

    def _prepare_for_marlin(self, run: Run, name: str, scales: int) -> None:
        """``prepare_fp4_layer_for_marlin`` (quantization/utils/marlin_utils_fp4.py): the weight is turned and packed;
        scales are turned, put in order and shifted in 16 bits, and compared on the way."""
        turned = run.new(run.named[f"{name}.weight"].bytes)
        _replace(run, f"{name}.weight")
        wide = run.replacing(run.new(scales), run.new(2 * scales))
        ordered = run.replacing(wide, run.new(2 * scales))
        run.temporary(scales)
        half = run.replacing(run.new(2 * scales), run.new(2 * scales))
        values = run.replacing(run.new(4 * scales), run.new(4 * scales))
        run.temporary(scales)
        run.free(values)
        shifted = run.replacing(half, run.new(2 * scales))
        run.temporary(scales)
        shifted = run.replacing(shifted, run.new(2 * scales))
        made = run.replacing(shifted, ordered, run.new(scales, f"{name}.scale"))
        run.named[f"{name}.scale"] = run.replacing(run.named[f"{name}.scale"], made)
        _replace(run, f"{name}.whole_scale")
        _order_bias(run, name)
        run.free(turned)

    def apply(self, run: Run, tokens: int, inputs: int, outputs: int) -> Tensor:
        size = tokens * outputs * self.itemsize
        if not self.native:
            return marlin_product(run, tokens, size)
        return run.replacing(*map(run.new, self.narrow_inputs(tokens, inputs)), run.new(size))

    def multiply(self, run: Run, tokens: int, inputs: int, outputs: int) -> Tensor:
        return run.new(tokens * outputs * self.itemsize)

    def narrow_inputs(self, tokens: int, width: int) -> list[int]:
        return [tokens * width // 2, _swizzled(tokens, width)] if self.native else []


def _swizzled(rows: int, width: int) -> int:
    """Bytes of scales of so many rows, in tiles of 128 by 4 (``create_fp4_scale_tensor``, _custom_ops.py)."""
    return cdiv(rows, 128) * 128 * cdiv(width // 16, 4) * 4


@dataclass(frozen=True)
class Excluding:
    """A method for all layers but those that the configuration names, which stay plain; or for ``experts_alone``."""

    method: WeightMethod
    plain: WeightMethod
    patterns: tuple[str, ...]
    cache_scales: CacheScales
    experts_alone: bool = False

    #: Layers that the engine fuses, by what their parts are called in checkpoints.
    _PARTS = (("qkv_proj", "q_proj"), ("gate_up_proj", "gate_proj"))

    @property
    def online(self) -> bool:
        return self.method.online

    def of(self, name: str) -> WeightMethod:
        if self.experts_alone and not name.endswith(".experts"):
            return self.plain
        names = [name, *(name.replace(fused, part) for fused, part in self._PARTS if fused in name)]
        excluded = any(self._excludes(pattern, one) for pattern in self.patterns for one in names)
        return self.plain if excluded else self.method

    @staticmethod
    def _excludes(pattern: str, name: str) -> bool:
        return matches(pattern[3:], name) if pattern.startswith("re:") else pattern in name


def _replace(run: Run, *names: str, after: Sequence[Tensor] = (), order: int = 0) -> None:
    """Parameters are made anew, one after another; what is let go ``after`` a new one is there. ``order``: bytes of a
    list of indices that they are put in order by."""
    for name in names:
        before, indices = run.named[name], [run.new(order)] if order else []
        run.named[name] = run.replacing(*indices, *after, before, run.new(before.bytes, name))


def _order_bias(run: Run, name: str) -> None:
    """``marlin_permute_bias`` (quantization/utils/marlin_utils.py)."""
    if f"{name}.bias" in run.named:
        _replace(run, f"{name}.bias", order=_ORDER // 2)


@dataclass(frozen=True)
class _Method:
    """A method: the least compute capability that the engine asks for, and the first version without it."""

    least: tuple[int, int]
    until: Version | None = None


#: By ``quant_method``: ``get_min_capability`` of each.
_METHODS = {
    "awq": _Method((7, 5)),
    "gptq": _Method((6, 0)),
    "fp8": _Method((7, 5)),
    "compressed-tensors": _Method((7, 0)),
    "bitsandbytes": _Method((7, 0), until=(0, 32)),
    "mxfp4": _Method((8, 0)),
    "modelopt_fp4": _Method((7, 5)),
}
#: Other names of them on the command line.
_SPELLINGS = {
    "awq_marlin": "awq", "auto_awq": "awq", "gptq_marlin": "gptq", "auto_gptq": "gptq", "nf4": "bitsandbytes",
    "fp4": "bitsandbytes", "fp8_per_tensor": "fp8", "nvfp4": "modelopt_fp4", "bitsandbytes_4bit": "bitsandbytes",
    "gpt_oss_mxfp4": "mxfp4", "modelopt": "fp8",
}  # fmt: skip


def method_for(question: Question, itemsize: int) -> tuple[LinearMethod, str | None, tuple[str, ...]]:
    """(how linear layers keep their weights, the method's name or None, its assumptions).

    Raises :class:`UsageError` for a method that is not followed, that the engine refuses on the card or in that
    version, and for one that contradicts the configuration.
    """
    own = mapping(question.model, "quantization_config")
    asked = question.quantization
    name = (
        _named(str(own["quant_method"]), str(own.get("quant_algo", "")))
        if own.get("quant_method")
        else ("bitsandbytes" if own.get("load_in_4bit") or own.get("load_in_8bit") else None)
    )
    if asked is not None:
        wanted = name if name == "modelopt_fp4" and asked == "modelopt" else _named(asked)
        if name is not None and wanted != name:
            raise UsageError(
                f"Quantization method specified in the model config ({name}) does not match the quantization method "
                f"specified in the quantization argument ({asked}); leave out --quantization"
            )
        name = wanted
    plain = Unquantized(itemsize)
    if name is None:
        return plain, None, ()
    _check(question, name)
    assumed: tuple[str, ...] = ()
    if not own and name != "fp8":
        assumed = (f"the configuration has no quantization_config: {name} as it is usual, 4 bits in groups of 128",)
    listed = own.get("modules_to_not_convert") or own.get("ignore") or ()
    excluded = tuple(map(str, listed)) if isinstance(listed, (list, tuple)) else ()
    method = _method(question, name, own, itemsize)
    # ``Mxfp4Config.get_quant_method``: linear layers stay as they are.
    return Excluding(method, plain, excluded, _cache_scales(name, own), name == "mxfp4"), name, assumed


def _cache_scales(name: str, own: Mapping[str, object]) -> CacheScales:
    """The method's scales for layers of attention; none where the engine itself quantises (online/base.py)."""
    if not own:
        return CacheScales.NONE
    return {
        "fp8": CacheScales.COPIED, "modelopt_fp4": CacheScales.COPIED, "compressed-tensors": CacheScales.KEPT
    }.get(name, CacheScales.NONE)  # fmt: skip


def _named(text: str, algorithm: str = "") -> str:
    """The method of this name; ModelOpt's by its ``algorithm`` (``override_quantization_method``, modelopt.py)."""
    if text.lower() == "modelopt" and "FP4" in algorithm.upper():
        return "modelopt_fp4"
    key = text.lower().replace("_", "-") if "compressed" in text.lower() else text.lower()
    key = _SPELLINGS.get(key, key)
    if key not in _METHODS:
        raise UsageError(
            f"quantization {shown(text)} is not followed; accepted: {', '.join(sorted({*_METHODS, 'nf4', 'nvfp4'}))}"
        )
    return key


def _check(question: Question, name: str) -> None:
    """``_verify_quantization`` and ``verify_quant_config`` (config/model.py, config/vllm.py)."""
    known, device, version = _METHODS[name], question.device, versions.checked(question.version)
    if known.until is not None and version >= known.until:
        raise UsageError(
            f"Unknown quantization method: {name}: vLLM {'.'.join(map(str, version))} has it no more; give "
            "--engine-version 0.21, or --quantization awq, gptq, fp8 or compressed-tensors"
        )
    if not reaches(device.capability, known.least):
        fits = sorted(one for one, method in _METHODS.items() if reaches(device.capability, method.least))
        raise UsageError(
            f"The quantization method {name} is not supported for the current GPU. Minimum capability: "
            f"{_number(known.least)}. Current capability: {_number(device.capability)} ({device.name}); it has "
            f"{', '.join(fits)}"
        )


def _number(capability: tuple[int, int]) -> str:
    return f"{capability[0]}{capability[1]}"


def _method(question: Question, name: str, own: Mapping[str, object], itemsize: int) -> WeightMethod:
    device = question.device
    model = question.model
    bits = _bits(model, own.get("bits", own.get("w_bit", _USUAL[0])))
    group = counted(model, "group_size", own.get("group_size", own.get("q_group_size")), _USUAL[1], least=-1) or -1
    hopper = device.compute_capability == _MACHETE_CARDS
    if name == "awq":
        zeros = bool(own.get("zero_point", True))
        hopper = hopper and versions.AWQ_BY_MACHETE.holds(versions.checked(question.version))
        return Packed(bits, group, itemsize, reorders=True, zeros=zeros, unpacks=_unpacks_awq(question), hopper=hopper)
    if name == "gptq":
        if own.get("desc_act") and group > 0 and versions.checked(question.version) >= versions.NEWEST:
            raise UsageError(
                "GPTQ group activation ordering (desc_act=True) is no longer supported. Use a checkpoint with static "
                "activation ordering or desc_act=False"
            )
        return Packed(bits, group, itemsize, drops_zeros=True, zeros=not own.get("sym", True), hopper=hopper)
    if name == "bitsandbytes":
        if own.get("load_in_8bit"):
            raise UsageError(f"{question.model.name}: bitsandbytes' int8 is not followed in vLLM; accepted: its 4 bits")
        nested = 0 if versions.SCALES_UNPACKED.holds(versions.checked(question.version)) else _NF4_NESTED
        return Float4(itemsize, _NF4_BLOCK, 4, unpacks=True, nested=nested)
    native = reaches(device.capability, _NATIVE_FP4)
    if name == "mxfp4":
        marlin = not reaches(device.capability, (9, 0)) or reaches(device.capability, (12, 0))
        # (fused_moe/oracle/mxfp4.py)
        return Float4(itemsize, 32, 1, native=native, padded_experts=marlin, sorted_experts=hopper)
    if name == "modelopt_fp4":
        inputs = "A16" not in str(own.get("quant_algo", ""))
        return NvFloat4(itemsize, _NVFP4_BLOCK, 1, native=native and inputs, inputs=inputs)
    if name == "compressed-tensors":
        return _compressed(question, own, itemsize)
    size = own.get("weight_block_size") or [0]
    if not isinstance(size, list) or type(size[0]) is not int or size[0] < 0:
        raise UsageError(f"{model.name}: weight_block_size is {shown(size)}; accepted: two whole numbers")
    return Float8(
        itemsize,
        block=size[0],
        online=not own,
        native=_multiplies_fp8(question, size[0]),
        narrows=reaches(question.device.capability, _NATIVE_FP8),
        static_inputs=own.get("activation_scheme") == "static",
    )


def _multiplies_fp8(question: Question, block: int) -> bool:
    """True if the card multiplies eight bits, scaled by blocks of that size where it is not 0."""
    blocks = block > 0 and versions.BLOCKS_BY_MARLIN.holds(versions.checked(question.version))
    return reaches(question.device.capability, _NATIVE_FP8_BLOCKS if blocks else _NATIVE_FP8)


def _unpacks_awq(question: Question) -> bool:
    """True if AWQ's own kernels run: asked for by that name, or on a card before Marlin's
    (``override_quantization_method``, awq_marlin.py)."""
    version = versions.checked(question.version)
    if versions.ONE_AWQ.holds(version):
        return False
    least = (7, 5) if versions.MARLIN_ON_TURING.holds(version) else (8, 0)
    return question.quantization == "awq" or not reaches(question.device.capability, least)


def _bits(model: ServedModel, value: object) -> int:
    if value not in (2, 3, 4, 8) or type(value) is not int:
        raise UsageError(f"{model.name}: bits of quantization_config are {shown(value)}; accepted: 2, 3, 4, 8")
    return value


#: Values that NVFP4 scales together, and what its kernels want rows and columns to be multiples of.
_NVFP4_BLOCK, _FP4_ALIGNMENT = 16, 32
#: Cards that multiply these (``cutlass_fp8_supported``, ``cutlass_block_fp8_supported``, ``cutlass_fp4_supported``).
_NATIVE_FP8, _NATIVE_FP8_BLOCKS, _NATIVE_FP4 = (8, 9), (9, 0), (10, 0)
#: Those from which and up to which CUTLASS multiplies experts (``cutlass_group_gemm_supported``).
_GROUPED = (9, 0), (11, 0)
#: The cards that Machete is for, and no later ones (``MacheteLinearKernel.can_implement``).
_MACHETE_CARDS = (9, 0)


def _compressed(question: Question, own: Mapping[str, object], itemsize: int) -> WeightMethod:
    """``compressed-tensors``: the scheme of its first group (schemes/)."""
    first = as_object(next(iter(as_object(own.get("config_groups")).values()), None))
    weights, inputs = as_object(first.get("weights")), as_object(first.get("input_activations"))
    model, device = question.model, question.device
    bits, kind = _bits(model, weights.get("num_bits", 4)), weights.get("type", "int")
    group = counted(model, "group_size", weights.get("group_size"), -1, least=-1) or -1
    strategy = weights.get("strategy", "group")
    if kind == "float" and bits == 8:
        block = weights.get("block_structure")
        edge = block[0] if isinstance(block, list) and block and type(block[0]) is int else 0
        return Float8(
            itemsize,
            block=edge if edge > 0 else -1 if strategy == "channel" else 0,
            native=_multiplies_fp8(question, edge),
            narrows=reaches(device.capability, _NATIVE_FP8),
            static_inputs=bool(inputs) and not inputs.get("dynamic", True),
            grouped=reaches(device.capability, _GROUPED[0]) and not reaches(device.capability, _GROUPED[1]),
        )
    if kind == "float" and bits == 4:
        native = reaches(device.capability, _NATIVE_FP4)
        if group != _NVFP4_BLOCK:
            return Float4(itemsize, group if group > 0 else 32, 1, native=native)
        return NvFloat4(itemsize, group, 1, native=native and bool(inputs), inputs=bool(inputs), divisors=True)
    if kind == "int" and bits == 8 and first.get("input_activations"):
        return Float8(itemsize, block=-1, integers=True)
    if kind == "int" and bits in (4, 8):
        hopper = device.compute_capability == _MACHETE_CARDS
        zeros = not weights.get("symmetric", True)
        return Packed(bits, group, itemsize, zeros=zeros, shape_tensor=True, hopper=hopper)
    raise UsageError(f"{question.model.name}: compressed-tensors of {bits} bits ({shown(kind)}) is not followed")
