"""How public code builds rotary tables, each as a constructor: ``FORMS[id](module, rows, rotary_dim)`` sets attributes.

The same operator sequences as the forms that the graph pass is tested with, without their readers.
"""

import functools
import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

FORMS = {}
# Tables over image grids: a user leaves such a submodule out of the certificate.
VISION = set()
# A reader of the form reaches the end of the table or past the bound: no class of that form can be certified.
FALSE = set()

BF, HF, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def form(name, *sets):
    def register(build):
        FORMS[name] = build
        for one in sets:
            one.add(name)
        return build

    return register


def inv(d, base=10000.0, dtype=F32):
    return 1.0 / (base ** (torch.arange(0, d, 2, dtype=dtype) / d))


def inv_int(d, base=10000.0):
    return 1.0 / (base ** (torch.arange(0, d, 2, dtype=torch.int64).float() / d))


def inv_cut(d, base=10000.0):
    return 1.0 / (base ** (torch.arange(0, d, 2)[: d // 2].float() / d))


def yarn_inv(d, factor, low=1.0, high=5.0):
    f = 10000.0 ** (torch.arange(0, d, 2, dtype=F32) / d)
    ramp = torch.clamp((torch.arange(d // 2, dtype=F32) - low) / (high - low), 0, 1)
    return (1.0 / (factor * f)) * ramp + (1.0 / f) * (1 - ramp)


def llama3_inv(d, old=64):
    f = inv(d)
    wavelength = 2 * math.pi / f
    smooth = (old / wavelength - 1.0) / 3.0
    middle = (1 - smooth) * f / 8.0 + smooth * f
    return torch.where(wavelength < old / 4.0, f, torch.where(wavelength > old, f / 8.0, middle))


def cos_sin(t, frequencies, dtype=BF, factor=None):
    f = torch.einsum("i,j -> ij", t, frequencies)
    c, s = (f.cos(), f.sin()) if factor is None else (f.cos() * factor, f.sin() * factor)
    return torch.cat((c, s), -1).to(dtype)


def base(frequencies, dtype=BF, rows=lambda n: n):
    def build(m, n, d):
        t = torch.arange(rows(n), dtype=F32)
        m.register_buffer("cos_sin_cache", cos_sin(t, frequencies(d), dtype), persistent=False)

    return build


for _name in ("F01", "F03", "F04", "F05", "F15", "F18"):
    FORMS[_name] = base(inv)
FORMS["F06"] = base(lambda d: inv(d, 10000.0 * 1000.0 ** (d / (d - 2))))
FORMS["F09"] = base(llama3_inv)


@form("F02")
def _(m, n, d):
    t = torch.arange(n / 4 * 4.0, dtype=F32)
    m.register_buffer("cos_sin_cache", cos_sin(t, yarn_inv(d, 4.0), BF, 1.1386))


@form("F07")
def _(m, n, d):
    f = inv(d)
    parts = [cos_sin(torch.arange(n * k, dtype=F32) / k, f, F32) for k in (1.0, 4.0)]
    m.register_buffer("cos_sin_cache", torch.cat(parts, 0).to(BF))


@form("F08")
def _(m, n, d):
    half = d // 2
    scaled = 10000.0 * ((2.0 * n / 64) - 1.0) ** (d / (d - 2))
    a = torch.tensor(4.0).log() / half**0.625
    lam = (a * torch.arange(1, half + 1).float() ** 0.625).exp()
    m.register_buffer("cos_sin_cache", cos_sin(torch.arange(n, dtype=F32), inv(d, scaled) / lam))


def _longrope(n, d, divisor, factor):
    f = 1.0 / (torch.tensor([divisor] * (d // 2), dtype=F32) * (10000.0 ** (torch.arange(0, d, 2, dtype=F32) / d)))
    return cos_sin(torch.arange(n, dtype=F32), f, BF, factor)


@form("F10")
def _(m, n, d):
    short, long = _longrope(64, d, 1.0, 1.0), _longrope(n, d, 2.0, 1.19)
    m.register_buffer("long_short_cos_sin_cache", torch.cat((short, long), 0))


@form("F11")
def _(m, n, d):
    m.register_buffer("cos_sin_cache", cos_sin(torch.arange(n / 40 * 40.0), yarn_inv(d, 40.0), F32, 1.0))


@form("F12")
def _(m, n, d):
    size, f = 48, inv(d)
    k = size - 8
    m.qc = cos_sin(torch.arange(k, dtype=F32), f)
    m.k = cos_sin(torch.arange(n, dtype=F32) % k, f)
    m.succ = cos_sin((torch.arange(k, dtype=F32) + k).clamp(max=size), f)
    m.inter = cos_sin(torch.arange(k, dtype=F32) + size, f)


@form("F13", VISION)
def _(m, n, d):
    side = math.isqrt(n)
    index = torch.arange(side * side, dtype=torch.int32).reshape(side * side, 1)
    index = torch.cat([index, index[:1]], 0)
    index[-1, -1] = -2
    f = inv_cut(d // 2)
    fx = (((index % side) + 1)[..., None] * f[None, None, :]).repeat_interleave(2, -1)
    fy = (((index // side) + 1)[..., None] * f[None, None, :]).repeat_interleave(2, -1)
    f = torch.cat([fx, fy], -1).float().contiguous()[..., ::2]
    f = f.masked_fill(index.reshape(-1, 1, 1) < 0, 0)
    m.freqs_ci = torch.view_as_complex(torch.stack([torch.cos(f), torch.sin(f)], -1))


@form("F16")
def _(m, n, d):
    k = d // 2 - 2
    c = nn.Parameter(torch.eye(k).repeat(2, 1, 1), requires_grad=False)
    f = torch.einsum("j,i -> ji", torch.arange(n, dtype=F32), inv(d)[:k])
    pc, ps = f.cos().unsqueeze(0).expand(2, -1, -1), f.sin().unsqueeze(0).expand(2, -1, -1)
    c, s = torch.einsum("htD, hDd -> thd", pc, c.float()), torch.einsum("htD, hDd -> thd", ps, c.float())
    s, c = F.pad(s, (0, 2), value=1.0), F.pad(c, (0, 2), value=1.0)
    m.register_buffer("cos_sin_cache", torch.cat((c, c, s, s), -1).to(BF))


@form("F17")
def _(m, n, d):
    e = torch.arange(0, d // 2, 2, dtype=F32) / d
    f = torch.cat((1.0 / (10000.0**e), torch.zeros(d // 2 - e.shape[0])))
    m.register_buffer("cos_sin_cache", cos_sin(torch.arange(n, dtype=F32), f))


@form("F20", VISION)
def _(m, n, d):
    m.angles = torch.outer(torch.arange(n, dtype=F32), inv(d // 2))


@form("F21")
def _(m, n, d):
    m.kept = torch.outer(torch.arange(n, dtype=F32), inv(d // 2))


@form("F22", VISION)
def _(m, n, d):
    side = math.isqrt(n)
    p = torch.arange(0, side * side).float()
    f = 1.0 / (10000.0 ** (torch.arange(0, d, 4)[: d // 4].float() / d))
    fx, fy = torch.outer(p % side, f).float(), torch.outer(p // side, f).float()
    zx, zy = torch.polar(torch.ones_like(fx), fx), torch.polar(torch.ones_like(fy), fy)
    m.table = torch.cat([zx.unsqueeze(-1), zy.unsqueeze(-1)], -1).reshape(side, side, -1)


@form("F23", VISION)
def _(m, n, d):
    f = 1.0 / (10000.0 ** (torch.arange(0, d, 2).float() / d))
    fh, fw = torch.outer(torch.arange(n), f[::2]).float(), torch.outer(torch.arange(4), f[1::2]).float()
    f = torch.cat([fh[:, None, :].repeat(1, 4, 1), fw[None, :, :].repeat(n, 1, 1)], -1)
    m.table = torch.polar(torch.ones_like(f), f)


@form("F24", VISION)
def _(m, n, d):
    g = torch.arange(n, dtype=F32)
    g += 1
    f = torch.einsum("..., f -> ... f", g, inv_cut(d // 2)).repeat_interleave(2, -1)[:, None].expand(n, 2, -1)
    f = torch.cat([f, f], -1).reshape(n * 2, -1)
    m.table = torch.cat([torch.zeros(1, f.shape[-1]), f], 0)[None, None]


@form("F25")
def _(m, n, d):
    whole = torch.cat((_longrope(64, d, 1.0, 1.0), _longrope(n, d, 2.0, 1.19)), 0)
    for name in ("short", "long", "both"):
        m.register_buffer(name, whole)


@form("F26")
def _(m, n, d):
    t = torch.arange(n, dtype=F32)
    t /= 2.0
    f = torch.outer(t, inv(d))
    m.cos, m.sin = torch.cos(f), torch.sin(f)


@form("F28")
def _(m, n, d):
    f = torch.outer(torch.arange(n, dtype=F32), inv(d))
    m.cos, m.sin = torch.cos(f).to(BF), torch.sin(f).to(BF)
    m.sections = torch.arange(3).view(1, 1, -1).expand(n, -1, -1)


@form("F29")
def _(m, n, d):
    m.inv_freq = nn.Buffer(inv_int(d))


@form("F30")
def _(m, n, d):
    a = np.arange(n, dtype=np.float32)[:, None] * inv(d).numpy()[None]
    m.table = nn.Buffer(torch.from_numpy(np.stack((np.cos(a), np.sin(a)), -1).reshape(1, -1).astype(np.float32)))


@form("F31")
def _(m, n, d):
    f = torch.outer(torch.arange(n + 128, dtype=F32) / 2.0, inv(d))
    m.cos, m.sin = torch.cos(f).to(BF), torch.sin(f).to(BF)


@form("F32")
def _(m, n, d):
    k = n - 3
    m.cos, m.sin = torch.zeros((n, d // 2), dtype=BF), torch.zeros((n, d // 2), dtype=BF)
    f = torch.outer(torch.arange(k, dtype=F32), inv(d))
    m.cos[0:k, :], m.sin[0:k, :] = torch.cos(f).to(BF), torch.sin(f).to(BF)
    for i in range(k, n):
        f = torch.outer(torch.tensor([i], dtype=F32), inv(d, 10000.0 * (2.0 * (i + 1) / k - 1.0) ** (d / (d - 2))))
        m.cos[i : i + 1, :], m.sin[i : i + 1, :] = torch.cos(f).to(BF), torch.sin(f).to(BF)


@form("F34")
def _(m, n, d):
    f = torch.outer(torch.arange(n, dtype=F32) / 2.0, inv(d)).unsqueeze(0).expand(3, -1, -1)
    f = torch.cat((f, f), -1)
    m.cos, m.sin = torch.cos(f).to(BF), torch.sin(f).to(BF)


@form("F35")
def _(m, n, d):
    f = torch.outer(torch.arange(n, dtype=F32), inv(d))
    m.cos, m.sin = torch.cos(f).to(BF), torch.sin(f).to(BF)


@form("F38")
def _(m, n, d):
    t = torch.arange(n, dtype=F32)
    t /= 2.0
    f = torch.einsum("i,j->ij", t, inv_int(d))
    e = torch.cat((f, f), -1)
    m.sin, m.cos = e.sin()[None, None].half(), e.cos()[None, None].half()


@form("F39")
def _(m, n, d):
    m.inv_freq = nn.Buffer(inv(d), persistent=False)


FORMS["F40"] = FORMS["F39"]


@form("F42")
def _(m, n, d):
    m.inv_freq = nn.Buffer(inv_int(d))
    f = torch.arange(n).type_as(m.inv_freq)[:, None] * m.inv_freq
    e = torch.cat((f, f), -1)
    m.kept = torch.stack([e.cos()[:, None, None, :], e.sin()[:, None, None, :]]).to(BF)


@form("F43")
def _(m, n, d):
    f = torch.arange(n).type_as(inv_int(d))[:, None] * inv_int(d)
    m.kept = torch.cat((f, f), -1).unsqueeze(0)


@form("F44", VISION)
def _(m, n, d):
    i = torch.ones(n, 4).cumsum(0).unsqueeze(-1)
    e = torch.zeros(1, n, 4, d // 2)
    e[:, :, :, 0::2] = i * inv(d // 2)
    e[:, :, :, 1::2] = i * inv(d // 2)
    m.cos = e.cos().repeat_interleave(2, -1).to(BF)


@form("F45")
def _(m, n, d):
    m.table = ((torch.arange(n, dtype=F32) / n)[:, None] * inv(d)).repeat_interleave(2, -1)


@form("F46")
def _(m, n, d):
    f = torch.outer(torch.arange(n, dtype=F32), inv_int(d))
    table = torch.cat([f.sin(), f.cos()], 1)
    m.weights = torch.cat([table.new_zeros(1, d), table])


@form("F48")
def _(m, n, d):
    m.inv_freq, m.long = nn.Buffer(inv(d), persistent=False), nn.Buffer(inv(d) / 2, persistent=False)


@form("F49")
def _(m, n, d):
    m.max_seq_len_cached = n
    f = torch.einsum("i,j->ij", torch.arange(n, dtype=F32), inv_int(d))
    e = torch.cat((f, f), -1)
    m.register_buffer("cos_cached", e.cos()[None, None, :, :], persistent=False)
    m.register_buffer("sin_cached", e.sin()[None, None, :, :], persistent=False)


@form("F50")
def _(m, n, d):
    f = torch.outer(torch.arange(n).to(F32), inv_int(d))
    e = torch.cat((f, f), -1)
    m.register_buffer("cos_cached", e.cos().to(BF), persistent=False)
    m.register_buffer("sin_cached", e.sin().to(BF), persistent=False)


@form("F51")
def _(m, n, d):
    f = torch.einsum("i,j->ij", torch.arange(n, dtype=F32), inv_int(d, 10000.0 * (n / 32.0 - 1.0) ** (d / (d - 2))))
    e = torch.cat((f, f), -1)
    m.cos, m.sin = e.cos()[None, None, :, :], e.sin()[None, None, :, :]


@form("F53")
def _(m, n, d):
    f = torch.outer(torch.arange(n, dtype=F64), yarn_inv(d, 4.0).to(F64))
    e = torch.cat((f, f), -1)
    m.cos, m.sin = (e.cos() * 1.1386)[None, None].to(F32), (e.sin() * 1.1386)[None, None].to(F32)


@form("F54")
def _(m, n, d):
    f = torch.outer(torch.arange(n, dtype=F32), inv(d, 500000.0)).float()
    m.table = torch.stack([torch.cos(f), torch.sin(f)], -1).bfloat16()


@form("F56")
def _(m, n, d):
    f = torch.outer(torch.arange(n).type_as(inv_int(d)), inv_int(d, 10000.0 * 2.0 ** (d / (d - 2))))
    e = torch.cat((f, f), -1)[None, :, None, :]
    m.kept = [e.cos(), e.sin()]


FORMS["F57"] = FORMS["F35"]


@form("F58", VISION)
def _(m, n, d):
    t = torch.arange(n) / n * 4
    f = torch.einsum("..., f -> ... f", t, inv_cut(d // 2)).repeat_interleave(2, -1)
    f = torch.cat(torch.broadcast_tensors(f[:, None, :], f[None, :4, :]), -1)
    m.register_buffer("cos", f.cos().view(-1, d))


@form("F59")
def _(m, n, d):
    m.inv_freq, m.seq_len_cached = nn.Buffer(inv_int(d), persistent=False), None


@form("F60")
def _(m, n, d):
    f = torch.einsum("i,j->ij", torch.arange(n).type_as(inv_int(d)), inv_int(d))
    e = torch.cat((f, f), -1)
    m.cos, m.sin = e.cos()[None, :, :], e.sin()[None, :, :]


@form("F61")
def _(m, n, d):
    f = torch.einsum("i , j -> i j", torch.arange(n, dtype=F32), 1.0 / (10000 ** (torch.arange(0, d, 2) / d))).float()

    def dup(x):
        return x.view(-1, 1).repeat(1, 2).view(x.shape[0], -1)

    m.sin, m.cos = dup(torch.sin(f)), dup(torch.cos(f))


@form("F62")
def _(m, n, d):
    f = torch.outer(torch.arange(n, dtype=F32), inv(d))
    m.cos, m.sin = torch.cos(f).to(BF), torch.sin(f).to(BF)


@form("F63")
def _(m, n, d):
    f = torch.einsum("i,j->ij", torch.arange(n, dtype=F32), inv(d))
    e = torch.cat((f, f), -1)
    m.cos, m.sin = e.cos().to(F32)[None, None], e.sin().to(F32)[None, None]


@form("F64")
def _(m, n, d):
    f = torch.outer(torch.arange(n), inv_cut(d)).float()
    m.freqs_cis = torch.polar(torch.ones_like(f), f)


@form("F65")
def _(m, n, d):
    f = torch.outer(torch.arange(2 * n), inv_cut(d) / 2).float()
    m.register_buffer("freqs_cis", torch.polar(torch.ones_like(f), f))


@form("F66")
def _(m, n, d):
    f = torch.outer(torch.arange(n, dtype=F32), inv_cut(d)).float()
    angle = torch.cat([f, f], -1)
    m.register_buffer("cache", torch.cat([angle.cos(), angle.sin()], -1), persistent=False)


@form("F67")
def _(m, n, d):
    m.theta = nn.Buffer(inv_cut(d), persistent=False)
    f = torch.einsum("i, j -> ij", torch.arange(n, dtype=m.theta.dtype), m.theta).float()
    m.register_buffer("cache", torch.stack([torch.cos(f), torch.sin(f)], -1), persistent=False)


@form("F68", VISION)
def _(m, n, d):
    side = math.isqrt(n)
    p = torch.cat([torch.arange(side * side, dtype=F32), -1 * torch.ones(1)])
    fx = torch.einsum("i, j -> ij", p % side + 1, inv_cut(d // 2)).float()
    fy = torch.einsum("i, j -> ij", p // side + 1, inv_cut(d // 2)).float()
    f = torch.cat([fx, fy], -1).masked_fill(p.unsqueeze(-1) < 0, 0)
    m.register_buffer("cache", torch.stack([torch.cos(f), torch.sin(f)], -1))


@form("F69")
def _(m, n, d):
    t = torch.arange(n).float() / 1
    a, b = torch.outer(t, inv_int(d)).repeat(1, 2), torch.outer(t, inv_int(d, 1e6)).repeat(1, 2)
    f = torch.stack((a, b), -1)
    m.register_buffer("cos", torch.cos(f) * 1.0)
    m.register_buffer("sin", torch.sin(f) * 1.0)


@functools.lru_cache(maxsize=32)
def _megatron(n, d, offset):
    t = torch.arange(n, dtype=F32) + offset
    t *= 1 / 2.0
    f = torch.outer(t, inv(d))
    return torch.cat((f, f), -1)[:, None, None, :]


@form("F71")
def _(m, n, d):
    _megatron.cache_clear()
    m.angles = _megatron(n, d, 5)


@form("F72")
def _(m, n, d):
    t = (torch.arange(n) + 0).type_as(inv_int(d))
    t *= 1 / (n / 64.0)
    f = torch.einsum("i , j -> i j", t, inv_int(d))
    m.angles = torch.cat((f, f), -1)[:, None, None, :]


@form("F73")
def _(m, n, d):
    f = torch.einsum("i,j->ij", torch.arange(n).type_as(inv_int(d)), inv_int(d))
    m.emb = torch.cat((f, f), -1)
    m.cos, m.sin = m.emb.cos()[:, None, None, :].to(HF), m.emb.sin()[:, None, None, :].to(HF)


@form("F74")
def _(m, n, d):
    m.buf = nn.Buffer(torch.empty(n, d // 2, 2), persistent=False)
    f = torch.outer(torch.arange(n), inv(d)[: d // 2]).float()
    m.buf.copy_(torch.view_as_real(torch.polar(torch.ones_like(f), f)))


@form("F75")
def _(m, n, d):
    m.box = {}
    with torch.autocast("cpu", enabled=False):
        f = torch.einsum("i , j -> i j", torch.arange(n, dtype=F32), inv(d))
        e = torch.cat((f, f), -1)
        m.box["sin"], m.box["cos"] = e.sin()[None, None], e.cos()[None, None]


@form("F76")
def _(m, n, d):
    buf = torch.empty((n + 1, d // 2, 2), dtype=F32)
    buf[0] = 0.0
    f = torch.outer(torch.arange(n, dtype=F32), inv(d))
    torch.polar(torch.ones_like(f), f, out=torch.view_as_complex(buf[1:]))
    m.freqs = buf


@form("F78", FALSE)
def _(m, n, d):
    t = torch.arange(n)
    top = t.max() + 1
    t = t[None]
    f = torch.einsum("b i , j -> b i j", t.type_as(inv_int(d)), inv_int(d)) / 2.0
    m.angles = torch.stack((f, f), -1).flatten(-2)
    scale = (torch.arange(0, d, 2) + 0.4 * d) / (1.4 * d)
    m.scale = scale ** ((t - (top // 2)) / 512)[..., None]


@form("F79", FALSE)
def _(m, n, d):
    m.buf = nn.Buffer(torch.zeros(n, d), persistent=False)
    t = (torch.arange(n, dtype=F32) + 0) / 1.0
    f = torch.einsum("..., f -> ... f", t, inv_cut(d)).repeat_interleave(2, -1)
    m.buf[:n] = f.detach()


@form("F80")
def _(m, n, d):
    f = torch.outer(torch.arange(n), inv_cut(d)).float()
    c, s = f.cos(), f.sin()
    m.table = torch.stack((c, -s, s, c), -1).view(*f.size(), 2, 2)


@form("F81")
def _(m, n, d):
    f = torch.outer(torch.arange(n, dtype=F32), inv(d, 100000.0))
    c, s = f.cos().to(BF), f.sin().to(BF)
    m.register_buffer("cos", c[None, :, None, :], persistent=False)
    m.register_buffer("sin", s[None, :, None, :], persistent=False)


@form("F82")
def _(m, n, d):
    w = ((1 / 1024) ** torch.linspace(0, 1, steps=d // 4, dtype=F32)).repeat_interleave(2)
    f = torch.outer(torch.arange(2 * n, dtype=F32), torch.cat([w, w.new_zeros(d // 2)]))
    m.cos, m.sin = nn.Buffer(f.cos().to(BF), persistent=False), nn.Buffer(f.sin().to(BF), persistent=False)
    m.sin[..., 1::2] *= -1


@form("F83", FALSE)
def _(m, n, d):
    scale = (torch.arange(0, d, 2) + 0.4 * d) / (1.4 * d)
    z = scale ** torch.arange(-n // 2, n - n // 2, 1).to(scale).div(512)[:, None]
    f = torch.einsum("i , j -> i j", torch.arange(0, n, dtype=F32), inv(d)).to(z)
    m.sin, m.cos = torch.sin(f) * z, torch.cos(f) * z


@form("F84")
def _(m, n, d):
    a = (1.0 / (10000 ** torch.linspace(0, 1, d // 2))).unsqueeze(-1).repeat(1, 2).flatten()
    i = torch.arange(n).to(a)
    m.sin, m.cos = torch.sin(i[:, None] * a[None, :]), torch.cos(i[:, None] * a[None, :])


@form("F85")
def _(m, n, d):
    f = torch.outer(torch.arange(n), inv_cut(d)).float()
    m.register_buffer("freqs_cos", torch.cos(f), persistent=False)
    m.register_buffer("freqs_sin", torch.sin(f), persistent=False)


@form("F86", VISION)
def _(m, n, d):
    t = (torch.arange(n, dtype=torch.int64).to(F32) + 0.0) / n * 4
    bands = 1.0 / (10000.0 ** (torch.arange(0, d // 4, 1, dtype=torch.int64).to(F32) / (d // 4)))
    grid = torch.stack(torch.meshgrid([t, t[:4]], indexing="ij"), -1).unsqueeze(-1)
    p = grid * bands
    m.emb = torch.cat([p.sin().reshape(n * 4, -1), p.cos().reshape(n * 4, -1)], -1)


@form("F87", VISION)
def _(m, n, d):
    side = math.isqrt(n)
    t = torch.arange(side * side, dtype=F32)
    tx, ty = (t % side).float(), torch.div(t, side, rounding_mode="floor").float()
    f = 1.0 / (10000.0 ** (torch.arange(0, d, 4)[: d // 4].float() / d))
    fx, fy = torch.outer(tx, f), torch.outer(ty, f)
    m.freqs_cis = torch.cat([torch.polar(torch.ones_like(fx), fx), torch.polar(torch.ones_like(fy), fy)], -1)


FORMS["F88"] = FORMS["F39"]


@form("F89", VISION)
def _(m, n, d):
    axes = [torch.linspace(0, n, n + 1, dtype=F32)[:n], torch.arange(0, 4, dtype=F32)]
    grid = torch.stack(torch.meshgrid(*axes, indexing="ij"), 0)
    f = torch.outer(grid[0].reshape(-1) * 1.0, inv_cut(d // 2, 256.0))
    m.cos, m.sin = f.cos().repeat_interleave(2, 1), f.sin().repeat_interleave(2, 1)


@form("F90")
def _(m, n, d):
    def table(k):
        w = 1.0 / torch.pow(10000, torch.arange(0, k, 2).to(F64).div(k))
        f = torch.outer(torch.arange(n), w)
        return torch.polar(torch.ones_like(f), f)

    m.freqs = torch.cat([table(d - 4 * (d // 6)), table(2 * (d // 6)), table(2 * (d // 6))], 1)


@form("F91")
def _(m, n, d):
    half, cs, ss = d // 2, [], []
    for _ in range(2):
        w = 1.0 / (10000.0 ** (torch.arange(0, half, 2, dtype=F64) / half)) / 1.0
        f = torch.outer(torch.arange(n), w)
        cs.append(f.cos().repeat_interleave(2, 1, output_size=half).float())
        ss.append(f.sin().repeat_interleave(2, 1, output_size=half).float())
    m.register_buffer("freqs_cos", torch.cat(cs, 1), persistent=False)
    m.register_buffer("freqs_sin", torch.cat(ss, 1), persistent=False)


@form("F92")
def _(m, n, d):
    half = d // 2
    f = [torch.einsum("..., f -> ... f", torch.arange(k, dtype=F32), inv_cut(half)) for k in (n, 4)]
    f = [one.repeat_interleave(2, -1) for one in f]
    f = torch.cat(torch.broadcast_tensors(f[0][:, None, :], f[1][None, :, :]), -1).contiguous()
    m.sin, m.cos = f.sin(), f.cos()


@form("F93", VISION)
def _(m, n, d):
    half = d // 2
    grid = torch.linspace(0, 8 * (n - 1) / n, n, dtype=F32)
    f = torch.outer(grid, 1.0 / (10000.0 ** (torch.arange(0, half, 2, dtype=F32) / half)))
    m.cos = f.cos().repeat_interleave(2, 1).float()


@form("F94", VISION)
def _(m, n, d):
    f = 1.0 / (10000.0 ** (torch.arange(0, d, 4)[: d // 4].float() / d))
    f = torch.outer(torch.arange(n, dtype=torch.float) / 1.5, f).float()
    z = torch.polar(torch.ones_like(f), f)
    a = z.view(n, 1, d // 4, 1).repeat(1, n, 1, 1)
    b = z.view(1, n, d // 4, 1).repeat(n, 1, 1, 1)
    m.freqs_cis = torch.cat([a, b], -1).flatten(2)


@form("F95")
def _(m, n, d):
    m.freqs_cis = []
    for _ in range(2):
        w = 1.0 / (256.0 ** (torch.arange(0, d // 2, 2, dtype=F64) / (d // 2)))
        f = torch.outer(torch.arange(n, dtype=F64), w).float()
        m.freqs_cis.append(torch.polar(torch.ones_like(f), f).to(torch.complex64))


@form("F97")
def _(m, n, d):
    w = torch.exp(-math.log(10000.0) * torch.arange(start=0, end=d // 2, dtype=F32) / (d // 2))
    m.args = torch.outer(torch.arange(n, dtype=w.dtype), w)


@form("F98")
def _(m, n, d):
    m.seq = torch.arange(n, dtype=F32)


@form("F99")
def _(m, n, d):
    f = torch.outer(torch.arange(n), inv(d // 2))
    m.grid = f[torch.arange(4) * n // 4].unsqueeze(1).expand(4, 3, -1)


@form("F100", VISION)
def _(m, n, d):
    w = nn.Parameter(torch.randn(3, 2, d // 2, generator=torch.Generator().manual_seed(0)))
    e = torch.linspace(-n / 2, n / 2, n + 1)
    p = torch.stack(torch.meshgrid(torch.arange(1, dtype=F32), (e[:-1] + e[1:]) / 2, e[:2], indexing="ij"), -1)
    with torch.no_grad():
        m.cos = torch.einsum("nd,dhf->nhf", p.reshape(-1, 3), w).cos()
