"""Quantization for core's tests: dialects, methods and kernel backends that plan and never touch a tensor.

Formats are those of published files: FP8 by tensor, channel and block, AWQ words, compressed-tensors' 4-bit words.
"""

import re

from steelyard.granularity import PerBlock, PerChannel, PerGroup, PerTensor
from steelyard.plugin import (
    DTYPES,
    Accept,
    Axis,
    Companion,
    ConfigError,
    Finding,
    Fixed,
    Footprint,
    Form,
    LayerScheme,
    Layout,
    StoredTensor,
    Verdict,
)

SCALAR = ((), (Fixed(1),))
SCALES = ("F32", "BF16", "F16")
OUTSIDE = ("lm_head", "gate")  # last segments of names that these dialects leave plain unless the file says otherwise


def kv_scales():
    """Return the KV-cache scales of one attention, under every spelling that exporters use."""
    made = []
    for one in ("k", "v"):
        spellings = (f".{one}_scale", f".attn.{one}_scale", f".{one}_proj.{one}_scale", f".{one}_proj.output_scale")
        tensor = StoredTensor(spellings, SCALES, SCALAR, absent="skip", role="scale", merge="per_part")
        made.append(Companion("AttentionState", tensor))
    return tuple(made)


class ToyQuantConfig:
    """A parsed config: one scheme for what is not ignored, or one for each group of targets."""

    def __init__(self, schemes, ignore, codes, notes=()):
        self.schemes, self.codes = schemes, codes
        self.ignore = dict.fromkeys(ignore, False)
        self.notes = list(notes)

    def scheme(self, names, cls, headers):
        if cls == "Embedding" or self._is_ignored(names):
            return None
        if names[0].rpartition(".")[2] in OUTSIDE and not self._is_coded(names, headers):
            return None
        for target, scheme in self.schemes.items():
            if target == cls or target == "*" or any(re.match(target, name) for name in names):
                return scheme
        return None

    def companions(self):
        return kv_scales()

    def findings(self):
        unused = [pattern for pattern, is_used in self.ignore.items() if not is_used]
        return [
            *self.notes,
            *(Finding("unused-pattern", "note", one, f"ignore entry {one!r} matched no layer") for one in unused),
        ]

    def _is_ignored(self, names):
        """Match entries on dot borders, at any depth."""
        found = [one for one in self.ignore if any(f".{one}." in f".{name}." for name in names)]
        for one in found:
            self.ignore[one] = True
        return bool(found)

    def _is_coded(self, names, headers):
        for name in names:
            for ending, dtype in self.codes:
                entry = headers.get(f"{name}{ending}")
                if entry is not None and entry.dtype == dtype:
                    return True
        return False


class Fp8Dialect:
    """``{"quant_method": "fp8"}``: by tensor, by block, or by channel (``weight_strategy``, a key of this toy)."""

    keys = ("fp8",)
    known = (
        "quant_method",
        "activation_scheme",
        "fmt",
        "weight_block_size",
        "weight_strategy",
        "modules_to_not_convert",
        "ignored_layers",
    )

    def parse(self, config, files):
        block = config.get("weight_block_size")
        if block is not None:
            granularity = PerBlock(*block)
        elif config.get("weight_strategy") == "channel":
            granularity = PerChannel()
        else:
            granularity = PerTensor()
        static = config.get("activation_scheme") == "static"
        ignore = [*(config.get("modules_to_not_convert") or ()), *(config.get("ignored_layers") or ())]
        unread = [key for key in config if key not in self.known]
        notes = [Finding("unread-key", "note", key, f"quantization key {key!r} is read by nobody") for key in unread]
        scheme = LayerScheme("fp8", granularity=granularity, options=(("static", static),))
        return ToyQuantConfig({"*": scheme}, ignore, ((".weight", "F8_E4M3"),), notes)


class AwqDialect:
    """``{"quant_method": "awq"}``."""

    keys = ("awq",)

    def parse(self, config, files):
        if config.get("bits") != 4:
            raise ConfigError(f"awq: bits={config.get('bits')!r}, this toy takes 4")
        scheme = LayerScheme("int4", "awq", PerGroup(config["group_size"]), symmetric=not config["zero_point"])
        return ToyQuantConfig({"*": scheme}, config.get("modules_to_not_convert") or (), ((".qweight", "I32"),))


class GroupsDialect:
    """compressed-tensors: groups with any name, each with targets (a class, or ``re:`` a pattern)."""

    keys = ("compressed-tensors",)

    def parse(self, config, files):
        if not config.get("config_groups"):
            raise ConfigError("compressed-tensors: config_groups is empty")
        schemes = {}
        for group in config["config_groups"].values():
            weights = group["weights"]
            if weights["type"] == "float":
                scheme = LayerScheme("fp8", granularity=PerChannel(), options=(("static", False),))
            else:
                scheme = LayerScheme("int4", "pack32", PerGroup(weights["group_size"]))
            for target in group["targets"]:
                schemes["*" if target == "Linear" else target.removeprefix("re:")] = scheme
        codes = ((".weight_packed", "I32"), (".weight", "F8_E4M3"))
        return ToyQuantConfig(schemes, config.get("ignore") or (), codes)


class PlanningOnly:
    """The half of a method that planning asks; the other half must not be reached."""

    bits = 8

    def prepared(self, scheme, node, form):
        return Footprint(node.n * node.k * self.bits // 8 + 4 * node.n, 4 * node.n)

    def prepare(self, stored, scheme, node, form):
        raise AssertionError("a plan prepares nothing")

    def dequantize(self, stored, scheme, node, to):
        raise AssertionError("a plan dequantizes nothing")


class Fp8Method(PlanningOnly):
    """FP8 codes with one scale a tensor, a row or a block; the scale's name depends on nothing else."""

    keys = ("fp8.plain", "fp8.plain.experts")

    def layouts(self, scheme, node):
        codes = StoredTensor((".weight",), ("F8_E4M3",), ((Axis("out"), Axis("in")),))
        names = (".weight_scale", ".weight_scale_inv")
        match scheme.granularity:
            case PerTensor():
                scale = StoredTensor(names, SCALES, SCALAR, role="scale", merge="per_part")
                layout = "by-tensor"
            case PerChannel():
                forms = ((Axis("out"), Fixed(1)), (Axis("out"),))
                scale = StoredTensor(names, SCALES, forms, role="scale")
                layout = "by-channel"
            case PerBlock(rows, cols):
                blocks = (Axis("out", rows, short_tail=True), Axis("in", cols, short_tail=True))
                scale = StoredTensor(names[::-1], ("F32",), (blocks,), role="scale", checks=("positive",))
                layout = "by-block"
        tensors = [codes, scale]
        if scheme.option("static"):
            tensors.append(StoredTensor((".input_scale",), SCALES, SCALAR, role="input_scale", merge="max"))
        return (Layout(layout, tuple(tensors)),)


class AwqMethod(PlanningOnly):
    """AWQ: eight codes along ``out`` in a word, groups along ``in``."""

    keys = ("int4.awq", "int4.awq.experts")
    bits = 4

    def layouts(self, scheme, node):
        group = scheme.granularity.size
        words, groups = Axis("out", 8), Axis("in", group)
        return (
            Layout(
                "awq-gemm",
                (
                    StoredTensor((".qweight",), ("I32",), ((Axis("in"), words),)),
                    StoredTensor((".qzeros",), ("I32",), ((groups, words),), role="zero"),
                    StoredTensor((".scales",), ("F16", "BF16"), ((groups, Axis("out")),), role="scale"),
                ),
            ),
        )


class Pack32Method(PlanningOnly):
    """compressed-tensors pack-quantized: eight codes along ``in`` in a word; each part keeps its own shape tensor."""

    keys = ("int4.pack32", "int4.pack32.experts")
    bits = 4

    def layouts(self, scheme, node):
        groups = Axis("in", scheme.granularity.size)
        return (
            Layout(
                "pack-quantized",
                (
                    StoredTensor((".weight_packed",), ("I32",), ((Axis("out"), Axis("in", 8)),)),
                    StoredTensor((".weight_scale",), SCALES, ((Axis("out"), groups),), role="scale"),
                    StoredTensor((".weight_shape",), ("I64",), ((Fixed(2),),), role="metadata", merge="per_part"),
                ),
            ),
        )


def backend(
    name,
    *,
    targets=("cpu", "sm_90", "gfx942"),
    weights=("fp8", "int4"),
    missing="",
    refuses="",
    smallest_grid=None,
    alignment=(1, 1),
    form=None,
):
    """Return a kernel backend's class with the name as its key.

    Args:
        name: Its key, and its form's name if ``form`` is None.
        targets: What it serves.
        weights: Weight formats that it takes.
        missing: Why it is not installed here; empty if it is.
        refuses: Why it takes no layer at all; empty if it does.
        smallest_grid: The finest refined grid of its form.
        alignment: Of its form.
        form: A function of (scheme, node) that returns the form instead.
    """

    class Backend:
        keys = (name,)
        asked = []  # (scheme, node, target) of every layer that it was asked for

        def serves(self, target):
            return Verdict(target in targets, "" if target in targets else f"has no kernels for {target}")

        def installed(self):
            return Verdict(not missing, missing)

        def accepts(self, scheme, node, target):
            self.asked.append((scheme, node, target))
            if refuses:
                return Accept(Verdict(False, refuses))
            if scheme.weight not in weights:
                return Accept(Verdict(False, f"computes {' and '.join(weights)}, not {scheme.weight}"))
            if form is not None:
                return Accept(Verdict(True), form(scheme, node))
            return Accept(Verdict(True), Form(name, smallest_grid=smallest_grid, alignment=alignment))

        def accepts_experts(self, w13, w2, node, target):
            first, second = self.accepts(w13, node.w13, target), self.accepts(w2, node.w2, target)
            return first if not first.verdict else second

        def linear(self, built, scheme, node):
            raise AssertionError("a plan builds no kernel")

        experts = linear

    return Backend


def bytes_of(code, *shape):
    """Return the bytes of a stored shape (for expected figures)."""
    total = DTYPES[code].bits
    for size in shape:
        total *= size
    return total // 8
