"""True read-backs while recording on the stub driver, whose kernels compute nothing and whose copies back give zeros.

    with true_values.follow("report.json"): ...

A mode of the Python API (nothing is dispatched differently, nothing more is allocated on the device) keeps, per device
storage, a host copy of the values of small tensors: from factories, copies to the device, and any function of known
values, computed again on the host. What is read back from known values is then true: results that are Python numbers
or host tensors are replaced, and counts that CUDA code reads back inside (``nonzero``, boolean indexing, ``unique``,
``repeat_interleave``, ``bincount``, ``one_hot``) are given to the stub beforehand (``fake_cuda_prime``). Random
integers and small random floats are drawn on the host: a possible draw, from a generator of its own. Everything else
is unknown and reads back as zeros; the report lists those read-backs with the line that asked. Read it.

Not followed: large tensors, floats that models make (routing, losses), reads inside C++ of values that C++ made,
``unique_consecutive(dim=)``, nested tensors and other subclasses, functorch. Not with torch.compile.

Environment: TRUE_VALUES_INT, TRUE_VALUES_FLOAT (largest tensors followed, in elements); TRUE_VALUES_SELECT=all: masks
of which nothing is known, and torchvision's suppression of boxes, select everything, as a prediction assumes.
"""

import collections
import contextlib
import ctypes
import json
import os
import struct
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

MAX_INT = int(os.environ.get("TRUE_VALUES_INT", 262144))
MAX_FLOAT = int(os.environ.get("TRUE_VALUES_FLOAT", 4096))
#: Whether masks of which nothing is known select everything, as a prediction assumes, instead of nothing.
SELECT_ALL = os.environ.get("TRUE_VALUES_SELECT") == "all"
OFF = torch._C.DisableTorchFunction
PLAIN = (
    (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
    if hasattr(torch.nn, "Buffer")
    else (torch.Tensor, torch.nn.Parameter)
)
#: What multiplies a sparse matrix, and coalesces it before.
PRODUCTS = ("mm", "_sparse_mm", "spmm", "matmul", "__matmul__", "addmm", "_sparse_addmm", "mv")
#: Nodes of products, of whose gradient a sparse matrix's transpose is a factor.
PRODUCTS_OF_SPARSE = ("SparseAddmm", "MmBackward", "AddmmBackward", "MvBackward")
#: Types that kernels pack into nested tensors; others are selected by a mask.
PACKED_BY_KERNEL = (torch.float32, torch.float16)


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


PASSIVE = _words(
    """
    size dim ndim shape stride numel nelement is_cuda is_cpu device dtype layout requires_grad requires_grad_ grad
    grad_fn is_leaf data_ptr untyped_storage storage storage_offset is_contiguous is_floating_point is_complex is_meta
    is_sparse is_quantized is_nested is_mkldnn is_xpu is_mps is_xla is_inference is_conj is_neg is_pinned is_shared
    is_set_to names has_names element_size nbytes itemsize get_device __hash__ __len__ __repr__ __dir__ __class__
    __dict__ __reduce_ex__ __reduce__ __setstate__ __deepcopy__ retain_grad retains_grad register_hook
    register_post_accumulate_grad_hook backward _backward_hooks _version output_nr _base _is_view name type_as_none
    is_same_size can_cast result_type is_tensor is_storage promote_types finfo iinfo record_stream share_memory_
    module_load _make_subclass _make_wrapper_subclass dim_order is_signed sym_size _is_zerotensor
    """
)
UNKNOWN = _words(
    """
    empty empty_like empty_strided new_empty new_empty_strided empty_permuted resize_ resize_as_ set_ _to_functorch
    """
)
RANDOM = _words(
    """
    rand randn randint randperm rand_like randn_like randint_like normal bernoulli multinomial poisson random_ uniform_
    normal_ bernoulli_ exponential_ geometric_ cauchy_ log_normal_ binomial trunc_normal_ kaiming_uniform_
    kaiming_normal_ xavier_uniform_ xavier_normal_ _standard_gamma dropout alpha_dropout feature_dropout dropout1d
    dropout2d dropout3d gumbel_softmax rrelu
    """
)
READS = _words(
    """
    item tolist __bool__ __int__ __float__ __index__ __complex__ __long__ is_nonzero equal allclose __contains__
    __format__
    """
)  # results that are no tensors
#: What ``torch.unique`` goes through, each of which reads how many there are.
UNIQUE = _words(
    """
    unique _unique _unique2 _unique_impl _return_output _return_inverse _return_counts _return_inverse_and_counts
    boolean_dispatch fn
    """
)
#: Functions that take sizes, bounds or numbers, which may be device tensors: of a tensor (behind it), or of none.
SIZED = _words(
    """
    view reshape expand repeat narrow split chunk new_zeros new_ones new_full new_empty tile pad select roll unflatten
    topk new_tensor permute
    """
)
SIZED_OF_NONE = _words(
    "arange linspace full zeros ones empty eye tensor as_tensor range randint randperm fill_diagonal_"
)
#: What gives its argument's values.
SAME_VALUES = _words("to cuda cpu clone contiguous detach alias type pin_memory _to_copy data requires_grad_")
#: Operators that one known operand can decide: generation is over at its greatest length whatever token was last.
OR, AND = _words("__or__ bitwise_or logical_or"), _words("__and__ bitwise_and logical_and")
#: Checks of values that nobody knows: those of a model that trains are finite.
FINITE = {"isfinite": True, "isnan": False, "isinf": False}
FILLS = {"zero_", "fill_", "copy_"} | RANDOM
SKIP = {"__get__", "__set__"}


class Entry:
    __slots__ = ("host", "ref", "version")

    def __init__(self, ref, host, version):
        self.ref, self.host, self.version = ref, host, version


def _name(f):
    n = getattr(f, "__name__", "") or ""
    if n in SKIP:  # a property's getter or setter
        n = getattr(getattr(f, "__self__", None), "__name__", "") + ("=" if n == "__set__" else "")
    elif isinstance(f, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        n = (
            f._schema.name.split("::")[-1]
            if isinstance(f, torch._ops.OpOverload)
            else f._qualified_op_name.split("::")[-1]
        )
    return n


def _device(a):
    if isinstance(a, torch.device):
        return torch.device("cpu") if a.type == "cuda" else a
    if isinstance(a, str) and (a == "cuda" or a.startswith("cuda:")):
        return "cpu"
    return a


def _where():
    for f in reversed(traceback.extract_stack()[:-2]):
        if not f.filename.startswith(os.path.dirname(torch.__file__)) and f.filename != __file__:
            return f"{f.filename}:{f.lineno}"
    return "?"


def _checks_a_distribution():
    """Whether ``torch.distributions`` asks if its parameters or a sample are valid, which those of a model that trains
    are: it raises otherwise."""
    frames = (frame.filename for frame in reversed(traceback.extract_stack(limit=8)) if frame.filename != __file__)
    return next(frames, "").endswith(os.path.join("torch", "distributions", "distribution.py"))


class TrueValues(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.table, self.sweep = {}, 0
        self.rows = {}  # weight of a sparse embedding -> ids looked up since its gradient was last coalesced
        self.rng = torch.Generator().manual_seed(20240229).get_state()
        self.true, self.untrue, self.odd = collections.Counter(), collections.Counter(), collections.Counter()
        lib = ctypes.CDLL(None)
        try:
            self._prime, self._clear, self._zero = (
                lib.fake_cuda_prime,
                lib.fake_cuda_prime_clear,
                lib.fake_cuda_d2h_zero,
            )
        except AttributeError:
            self._prime = None
        else:
            self._prime.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
            self._prime.restype = None
            self._clear.restype = self._zero.restype = ctypes.c_ulonglong

    # ------------------------------------------------------------ the side table
    def plain(self, t):
        return (
            type(t) in PLAIN
            and t.layout == torch.strided
            and t.device.type == "cuda"
            and not torch._C._functorch.is_functorch_wrapped_tensor(t)
        )

    def version(self, t):
        return -1 if t.is_inference() else t._version

    def entry(self, t):
        if not self.table:
            return None
        st = t.untyped_storage()
        e = self.table.get(st._cdata)
        if e is None:
            return None
        if e.ref.expired() or e.host.nbytes() != st.nbytes() or self.version(t) > e.version:
            del self.table[st._cdata]
            return None
        return e

    def drop(self, t):
        self.table.pop(t.untyped_storage()._cdata, None)

    def host(self, t):
        """The host tensor of a known device tensor (a view of the storage's host copy), or None."""
        e = self.entry(t)
        if e is None:
            return None
        h = torch.empty(0, dtype=t.dtype).set_(e.host, t.storage_offset(), t.size(), t.stride())
        return h.conj() if t.is_conj() else h

    def fits(self, t):
        return t.numel() <= (MAX_FLOAT if t.is_floating_point() or t.is_complex() else MAX_INT)

    def learn(self, t, value):
        st = t.untyped_storage()
        n = st.nbytes()
        if n > 16 * MAX_INT or t.dtype.is_complex:
            return False
        e = Entry(StorageWeakRef(st), torch.UntypedStorage(n), self.version(t))
        if value is None:
            e.host.fill_(0)
        self.table[st._cdata] = e
        if value is not None:
            h = torch.empty(0, dtype=t.dtype).set_(e.host, t.storage_offset(), t.size(), t.stride())
            h.copy_(value)
        self.sweep += 1
        if self.sweep >= 4096:
            self.sweep = 0
            for k in [k for k, e in self.table.items() if e.ref.expired()]:
                del self.table[k]
        return True

    def looked_up(self, ids, weight):
        """The rows of a weight that a sparse embedding looks up: its gradient's indices, put together in C++."""
        known = self.host(ids) if isinstance(ids, torch.Tensor) and ids.device.type == "cuda" else None
        self.rows.setdefault(weight, []).append(None if known is None else known.reshape(1, -1).clone())

    def rows_of(self, grad):
        """The indices of a sparse tensor, or those looked up of the weight whose gradient it is; None: unknown."""
        known = self.host(grad._indices())
        looked_up = next((rows for weight, rows in self.rows.items() if weight.grad is grad), [])
        if known is None and looked_up and all(rows is not None for rows in looked_up):
            known = torch.cat(looked_up, 1)
            known = known if known.shape[1] == grad._indices().shape[1] else None
        looked_up.clear()
        return known

    # ------------------------------------------------------------ counts that CUDA code reads back
    def counts(self, n, args, kwargs):
        """[(bytes)] for the device-to-host copies inside function n, or None."""

        def val(a):
            if not isinstance(a, torch.Tensor):
                return None
            if a.device.type == "cpu":
                return a
            return self.host(a) if self.plain(a) else None

        def mask(a):
            """An unknown mask selects everything, where that is asked for, and is known from then on."""
            v = val(a)
            if v is None and SELECT_ALL and isinstance(a, torch.Tensor) and self.plain(a):
                v = torch.ones(a.shape, dtype=a.dtype)
                if a.numel() * a.element_size() == a.untyped_storage().nbytes() and self.fits(a):
                    self.learn(a, v)
            return v

        i4, i8 = (lambda c: struct.pack("<i", int(c))), (lambda c: struct.pack("<q", int(c)))
        a0 = args[0] if args else kwargs.get("input", kwargs.get("condition"))
        if n in ("nonzero", "argwhere") or (n == "where" and len(args) + len(kwargs) == 1):
            v = mask(a0)
            return None if v is None else [i4(torch.count_nonzero(v))]
        if n == "to_sparse_csr":  # what is not zero is looked for twice, for indices and for values
            v = a0 if a0.layout is not torch.strided else val(a0)
            v = torch.ones(a0.shape) if v is None and SELECT_ALL else v
            return None if v is None or v.layout is not torch.strided else [i4(torch.count_nonzero(v))] * 2
        if n == "to_sparse" and a0.layout is torch.strided:  # what is not zero, and the distinct rows of it
            v = val(a0)
            v = torch.ones(a0.shape) if v is None and SELECT_ALL else v
            places = None if v is None else v.nonzero()[:, : args[1] if len(args) > 1 else a0.dim()]
            counts = () if places is None else (len(places), *([len(places.unique(dim=0))] if len(args) > 1 else []))
            return list(map(i4, counts)) or None
        if n == "nms":  # torchvision's: what is kept is data of its kernel, never followed
            return [i4(a0.shape[0])] if SELECT_ALL else None
        if n in ("__getitem__", "__setitem__", "index_put_", "index_put", "_index_put_impl_", "index"):
            ix = args[1] if len(args) > 1 else kwargs.get("indices")
            out = []
            some = False
            for x in ix if isinstance(ix, (tuple, list)) else (ix,):
                if isinstance(x, torch.Tensor) and x.device.type == "cuda" and x.dtype in (torch.bool, torch.uint8):
                    v = mask(x)
                    some = some or v is not None
                    c = 0 if v is None else torch.count_nonzero(v)
                    out.append(i4(c) if x.dim() else bytes([int(c)]))  # a mask of no dimensions is read itself
            if some:
                return out
            if isinstance(ix, (tuple, list, slice)):  # an index or a slice's bound that is a device number
                for x in ix if isinstance(ix, (tuple, list)) else (ix,):
                    for y in (x.start, x.stop, x.step) if isinstance(x, slice) else ():
                        v = val(y) if isinstance(y, torch.Tensor) and y.device.type == "cuda" else None
                        if v is not None:
                            out.append(v.contiguous().reshape(-1)[:1].numpy().tobytes())
                return out or None
            return None
        if n == "normal":  # asks twice whether no deviation is negative: native/DistributionTemplates.h
            deviation = args[1] if len(args) > 1 else kwargs.get("std")
            return [b"\1"] * 2 if isinstance(deviation, torch.Tensor) and deviation.device.type == "cuda" else None
        if n in ("_nested_tensor_from_mask_left_aligned", "_nested_tensor_from_mask"):
            v = val(args[1])
            if v is None:
                return None
            lengths = v.long().sum(1)
            aligned = bool((v.long().cummin(1).values == v).all())
            if n == "_nested_tensor_from_mask_left_aligned":
                return [bytes([aligned])]
            sizes = torch.stack((lengths, torch.full_like(lengths, args[0].size(2))), 1)
            check = kwargs.get("mask_check", args[2] if len(args) > 2 else True)
            packed = [] if args[0].dtype in PACKED_BY_KERNEL else [i4(lengths.sum() * args[0].size(2))]
            return [*([bytes([aligned])] if check else []), sizes.numpy().tobytes(), *packed]
        if n == "_transformer_encoder_layer_fwd":  # packs again where it attends by products
            nested = args[0].is_nested and args[0].dtype not in PACKED_BY_KERNEL
            return [i4(args[0]._nested_tensor_size().prod(1).sum())] if nested else None
        if n == "coalesce":  # how many indices are distinct: thrust::unique_by_key, SparseCUDATensor.cu
            rows = None if a0.is_coalesced() else self.rows_of(a0)
            return None if rows is None else [i4(torch.unique(rows, dim=1).shape[1])]
        if n == "masked_select":
            m = args[1] if len(args) > 1 else kwargs.get("mask")
            v = mask(m)
            return None if v is None else [i4(torch.count_nonzero(v.expand(torch.broadcast_shapes(v.shape, a0.shape))))]
        if n == "repeat_interleave":
            r = args[1] if len(args) > 1 else kwargs.get("repeats", a0)
            v = val(r) if isinstance(r, torch.Tensor) else None
            return (
                None
                if v is None
                else [i8(v.sum()), b"\1" if bool((v >= 0).all()) else b"\0"]
                if kwargs.get("output_size") is None
                else [b"\1"]
            )
        if n in UNIQUE:
            v = val(a0)
            if v is None:
                return None
            d = kwargs.get("dim", args[4] if len(args) > 4 else None)
            if v.dtype == torch.bool and d is None:
                return [i4(v.sum())]
            c = torch.unique(v, dim=d).size(d) if d is not None else torch.unique(v).numel()
            return [i4(c)] if d is not None else [i8(c)]
        if n in ("unique_consecutive", "_unique_consecutive_impl"):
            v = val(a0)
            return None if v is None or kwargs.get("dim") is not None else [i8(torch.unique_consecutive(v).numel())]
        if n == "bincount":
            v = val(a0)
            return None if v is None or not v.numel() else [i8(v.min()), i8(v.max())]
        if n == "one_hot":
            c = args[1] if len(args) > 1 else kwargs.get("num_classes", -1)
            v = val(a0)
            return None if v is None or c != -1 or not v.numel() else [i8(v.max())]
        if n == "ctc_loss":
            given = dict(zip(("targets", "input_lengths", "target_lengths"), args[1:4], strict=False)) | kwargs
            values = [val(given[name]) for name in ("targets", "input_lengths", "target_lengths") if name in given]
            if len(values) < 3 or any(v is None for v in values):
                return None
            targets, steps, lengths = (v.contiguous().numpy().tobytes() for v in values)
            asked = self.cudnn_ctc(a0, given, *values[1:])
            by_cudnn = len(asked) == 2 * values[1].numel() + 1 and self.fits_cudnn_ctc(*values[1:])
            return [*asked, targets, *(asked if by_cudnn else (steps, lengths))]
        if n in SIZED or n in SIZED_OF_NONE:
            args = args[1:] if n in SIZED else args
            fl, _ = tree_flatten((args, kwargs))
            out = []
            for x in fl:
                if isinstance(x, torch.Tensor) and x.device.type == "cuda" and x.numel() == 1:
                    v = val(x)
                    if v is None:
                        return None
                    out.append(v.contiguous().numpy().tobytes())
            return out or None
        return None

    def cudnn_ctc(self, log_probs, given, input_lengths, target_lengths):
        """What ``_use_cudnn_ctc_loss`` (native/cudnn/LossCTC.cpp) reads, where shapes and types suit it: the targets'
        lengths, and both again for every target until one does not suit. It is asked again before cuDNN runs."""
        tensors = [given[name] for name in ("targets", "input_lengths", "target_lengths")]
        suits = log_probs.dtype == torch.float32 and all(t.dtype == torch.int32 for t in tensors)
        if not suits or not torch.backends.cudnn.enabled or given.get("blank", 0) or tensors[0].dim() != 1:
            return []
        steps, lengths = (v.contiguous().numpy().tobytes() for v in (input_lengths, target_lengths))
        read = [lengths]
        for index in range(len(target_lengths)):
            read += [steps, lengths]
            if not self.fits_cudnn_ctc(input_lengths[index], target_lengths[index]):
                break
        return read

    @staticmethod
    def fits_cudnn_ctc(input_lengths, target_lengths):
        return bool(((target_lengths < 256) & (target_lengths <= input_lengths)).all())

    def prime(self, entries):
        self._clear()
        for b in entries:
            self._prime(b, len(b))

    @staticmethod
    def distinct(tensors):
        """How many distinct indices the sparse matrix among them has; None: there is none, or nobody knows."""
        for sparse in tensors:
            if isinstance(sparse, torch.Tensor) and sparse.layout is torch.sparse_coo and sparse._nnz() > 1:
                if sparse.is_coalesced():
                    return sparse._nnz()
                indices = sparse._indices() if sparse.device.type == "cpu" else None
                return getattr(sparse, "_distinct", None) if indices is None else torch.unique(indices, dim=1).shape[1]
        return None

    def prime_product(self, out, ins):
        """The gradient of a product with a sparse matrix coalesces its transpose."""
        count = self.distinct(ins)
        if count is not None:
            self.prime_backward(out, ins, [struct.pack("<i", count)], PRODUCTS_OF_SPARSE)

    def prime_backward(self, out, ins, entries, kinds=("Index", "MaskedSelect")):
        """The backward of an index by a mask counts the mask again."""
        old = {id(t.grad_fn) for t in ins if isinstance(t, torch.Tensor) and t.grad_fn is not None}
        todo = [t.grad_fn for t in tree_flatten(out)[0] if isinstance(t, torch.Tensor) and t.grad_fn is not None]
        for _ in range(4):
            for g in todo:
                if any(k in g.name() for k in kinds):

                    def before(grads, e=entries * 2):
                        self.prime(e)

                    def after(gi, go):
                        self._clear()

                    g.register_prehook(before)
                    g.register_hook(after)
                    return
            todo = [n for g in todo for n, _ in g.next_functions if n is not None and id(n) not in old]

    # ------------------------------------------------------------ every call of the Python API
    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        n = _name(func)
        if n in PASSIVE or any(not isinstance(one, torch.Tensor) and _overrides(one) for one in args):
            return func(*args, **kwargs)  # of what is not a tensor (a proxy of torch.fx) nothing is known
        with OFF():
            if n == "embedding" and kwargs.get("sparse", args[6] if len(args) > 6 else False):
                self.looked_up(args[0], args[1])
            flat, spec = tree_flatten((tuple(args), kwargs))
            bounds = [
                x
                for a in flat
                if isinstance(a, slice)
                for x in (a.start, a.stop, a.step)
                if isinstance(x, torch.Tensor)
            ]
            dev = [t for t in flat + bounds if isinstance(t, torch.Tensor) and t.device.type == "cuda"]
            odd = any(not self.plain(t) for t in dev)
            primed = None
            hosts = {} if odd else {id(t): self.host(t) for t in dev}
            counted = not odd or n in ("_transformer_encoder_layer_fwd", "coalesce")
            if self._prime and dev and counted:
                try:
                    with torch.no_grad():
                        primed = self.counts(n, tuple(args), kwargs)
                except Exception as e:
                    self.odd[f"counts of {n}: {type(e).__name__} {str(e)[:80]}"] += 1
                if primed:
                    self.prime(primed)
            if primed is None and self._prime and odd and n in PRODUCTS:
                count = self.distinct(dev)
                if count is not None and not any(t.is_coalesced() for t in dev if t.layout is torch.sparse_coo):
                    primed = [struct.pack("<i", count)]
                    self.prime(primed)
            zeros = self._zero() if self._prime else 0
        try:
            out = func(*args, **kwargs)
        except torch.OutOfMemoryError:
            # Its traceback holds this frame, which a card's does not have: no tensor may live for it.
            args = kwargs = flat = bounds = dev = hosts = None
            raise
        finally:
            if primed:
                left = self._clear()
        with OFF():
            zeros = self._zero() - zeros if self._prime else 0
            if isinstance(out, torch.Tensor) and out.layout is torch.sparse_coo and n in ("cuda", "to"):
                out._distinct = self.distinct(flat)
            if odd and torch.is_grad_enabled() and isinstance(out, torch.Tensor) and out.requires_grad and self._prime:
                self.prime_product(out, flat)
            if odd:
                if zeros:
                    self.untrue[f"{n} at {_where()}"] += 1
                return out
            if primed and torch.is_grad_enabled():
                if left < len(primed):
                    self.true[f"{n}: counts"] += 1
                if n in ("__getitem__", "__setitem__", "index", "index_put", "index_put_", "masked_select"):
                    self.prime_backward(args[0] if n == "__setitem__" else out, flat, primed)
            elif primed and left < len(primed):
                self.true[f"{n}: counts"] += 1
            try:
                known, out = self.follow(func, n, out, flat, spec, dev, hosts)
            except Exception as e:
                self.odd[f"{n}: {type(e).__name__} {str(e).splitlines()[0][:100] if str(e) else ''}"] += 1
                for t in dev:
                    self.drop(t)
                known = False
            if zeros and not known and not (primed and left == 0):
                if n == "__bool__" and _checks_a_distribution():
                    self.true["__bool__: check of a distribution"] += 1
                    return True
                self.untrue[f"{n} at {_where()}"] += 1
        return out

    def drawn(self, flat, out):
        """A possible draw where no weight is known: a sampled token is one of the vocabulary."""
        weights = next(a for a in flat if isinstance(a, torch.Tensor))
        generator = torch.Generator()
        generator.set_state(self.rng)
        value = torch.randint(0, weights.shape[-1], out.shape, generator=generator)
        self.rng = generator.get_state()
        return value

    def follow(self, func, n, out, flat, spec, dev, hosts):
        oflat, ospec = tree_flatten(out)
        odev = [t for t in oflat if isinstance(t, torch.Tensor) and t.device.type == "cuda"]
        if not dev and not odev:
            return True, out
        if any(not self.plain(t) for t in odev):
            return False, out
        first = flat[0] if flat else None
        if (
            dev
            and n in FILLS
            and first is dev[0]
            and not any(t is first for t in dev[1:])
            and self.fits(first)
            and first.numel() * first.element_size() == first.untyped_storage().nbytes()
        ):
            hosts[id(first)] = "fill"  # overwritten whole: known from here on, whatever it held
        unknown = any(h is None for h in hosts.values())
        if unknown and n in FINITE and self.fits(odev[0]):
            return self.learn(odev[0], torch.full(odev[0].shape, FINITE[n])), out
        if unknown and (n in OR or n in AND) and len(odev) == 1 and not any(odev[0] is t for t in dev):
            decided = _decided(n, odev[0], hosts.values())
            if decided is not None and self.fits(odev[0]):
                return self.learn(odev[0], decided), out
        if unknown and n == "multinomial" and self.fits(odev[0]) and not any(odev[0] is t for t in dev):
            return self.learn(odev[0], self.drawn(flat, odev[0])), out
        if n == "data=" or n in UNKNOWN:
            for t in dev:
                if n in ("resize_", "resize_as_", "set_"):
                    self.drop(t)
            return False, out
        if unknown or any(not self.fits(t) for t in odev):
            writes = (
                (n[-1:] == "_" and n[-2:] != "__")
                or (n[:3] == "__i" and n not in ("__invert__", "__index__", "__int__", "__iter__"))
                or n == "__setitem__"
                or any(o is t for o in odev for t in dev)
            )
            for t in dev:  # what was written with something unknown is unknown
                e = self.table.get(t.untyped_storage()._cdata)
                if e is not None and (writes if t.is_inference() else t._version > e.version):
                    self.drop(t)
            return False, out
        for k, h in list(hosts.items()):
            if isinstance(h, str):
                self.learn(first, None)
                hosts[k] = self.host(first)
        if n == "__iter__":
            return True, out

        def arg(a):
            if isinstance(a, torch.Tensor):
                if a.device.type == "cuda":
                    return hosts[id(a)]
                return a.detach() if a.requires_grad else a
            if isinstance(a, slice):
                return slice(arg(a.start), arg(a.stop), arg(a.step))
            return _device(a)

        with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            if n in SAME_VALUES:
                src = next(a for a in flat if isinstance(a, torch.Tensor))
                r = arg(src)
                cflat = [r] * len(oflat)
            else:
                a, k = tree_unflatten([arg(x) for x in flat], spec)
                for d in ("generator", "pin_memory", "non_blocking"):
                    k.pop(d, None)
                if n == "copy_":
                    a = tuple(a[:2])
                if n in RANDOM:
                    keep = torch.get_rng_state()
                    torch.set_rng_state(self.rng)
                    try:
                        c = func(*a, **k)
                    finally:
                        self.rng = torch.get_rng_state()
                        torch.set_rng_state(keep)
                else:
                    c = func(*a, **k)
                cflat, _cspec = tree_flatten(c)
            if len(cflat) != len(oflat):
                self.odd[f"{n}: other number of results"] += 1
                return False, out
            for t in dev:  # known mutations are followed
                e = self.table.get(t.untyped_storage()._cdata)
                if e is not None and not t.is_inference():
                    e.version = max(e.version, t._version)
            new, changed = list(oflat), False
            for i, (o, c) in enumerate(zip(oflat, cflat, strict=False)):
                if isinstance(o, torch.Tensor):
                    if not isinstance(c, torch.Tensor) or o.shape != c.shape:
                        self.odd[
                            f"{n}: shape {tuple(o.shape)}, not {tuple(c.shape) if isinstance(c, torch.Tensor) else c}"
                        ] += 1
                        if o.device.type == "cuda":
                            self.drop(o)
                        continue
                    if o.device.type == "cuda":
                        if self.table.get(o.untyped_storage()._cdata) is None or self.entry(o) is None:
                            self.learn(o, c.detach())
                    elif dev and o is not c and o.data_ptr() != c.data_ptr():
                        o.detach().copy_(c)
                        self.true[n] += 1  # read back
                elif n in READS:
                    new[i], changed = c, True
                    self.true[n] += 1
        return True, tree_unflatten(new, ospec) if changed else out

    def report(self):
        return {
            "true": dict(self.true),
            "untrue": dict(self.untrue),
            "odd": dict(self.odd),
            "followed": len(self.table),
        }


@contextlib.contextmanager
def follow(report: str | None = None) -> Iterator[None]:
    """Follow values if ``report`` (or GRAPHMEM_TRUE_VALUES) names a file, which takes the report; else do nothing."""
    report = report or os.environ.get("GRAPHMEM_TRUE_VALUES")
    if not report:
        yield
        return
    mode = TrueValues()
    asks = torch.overrides.has_torch_function
    # Under any mode has_torch_function says True, and nn.TransformerEncoder leaves its fast path: ask of the tensors.
    torch.overrides.has_torch_function = lambda tensors: any(map(_overrides, tensors))
    try:
        with mode:
            yield
    finally:
        torch.overrides.has_torch_function = asks
        Path(report).write_text(json.dumps(mode.report(), indent=1) + "\n", encoding="utf-8")


def _decided(name, out, hosts):
    """The result of an operator of :data:`OR` or :data:`AND` that a known operand decides; None where none does."""
    known = [host for host in hosts if isinstance(host, torch.Tensor)]
    if name in OR and out.dtype is torch.bool and any(host.dtype is torch.bool and bool(host.all()) for host in known):
        return torch.ones(out.shape, dtype=torch.bool)
    if name in AND and any(not bool(host.any()) for host in known):
        return torch.zeros(out.shape, dtype=out.dtype)
    return None


def _overrides(value: Any) -> bool:
    if type(value) in PLAIN:
        return False
    overriding = getattr(type(value), "__torch_function__", None)
    return overriding not in (None, torch._C._disabled_torch_function_impl)
