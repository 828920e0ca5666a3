"""How public code builds and reads rotary tables: one small module a form, with inputs.

Each builds the table inside ``forward`` with the operators of the form and reads it as the form does. The ids are those
of ``outcomes.txt``.
"""

import collections
import functools
import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

REG = collections.OrderedDict()
DT32, DT64, BF, HF = torch.float32, torch.float64, torch.bfloat16, torch.float16


def form(fid, title, pos="n", q="nhd", qdtype=BF):
    def deco(cls):
        assert fid not in REG, fid
        cls.fid, cls.title, cls.pos, cls.qlay, cls.qdtype = fid, title, pos, q, qdtype
        REG[fid] = cls
        return cls

    return deco


class Form(nn.Module):
    def __init__(self, rows, rotary_dim):
        super().__init__()
        self.rows, self.rd = rows, rotary_dim
        self.side = int(math.isqrt(rows))
        self.setup()

    def setup(self):
        pass


# ------------------------------------------------------------------ helpers
def inv(d, base=10000.0, dtype=DT32):
    return 1.0 / (base ** (torch.arange(0, d, 2, dtype=dtype) / d))


def inv_int(d, base=10000.0):
    return 1.0 / (base ** (torch.arange(0, d, 2, dtype=torch.int64).float() / d))


def inv_cut(d, base=10000.0):
    return 1.0 / (base ** (torch.arange(0, d, 2)[: d // 2].float() / d))


def rot_half(x):
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def rot_pair(x):
    return torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)


def use_half(q, c, s):
    """neox rotation with half-width tables [.., d/2] and q [N,H,D]"""
    c, s = c.unsqueeze(-2).to(q.dtype), s.unsqueeze(-2).to(q.dtype)
    a, b = q.chunk(2, -1)
    return torch.cat((a * c - b * s, b * c + a * s), -1)


def use_full(q, c, s):
    return q * c + rot_half(q) * s


def use_pair(q, c, s):
    return q * c + rot_pair(q) * s


def use_cplx(q, fc):
    z = torch.view_as_complex(q.float().reshape(*q.shape[:-1], -1, 2))
    return torch.view_as_real(z * fc).flatten(-2).to(q.dtype)


def use_ri(q, cs):
    """q [.., D], cs [.., D/2, 2] (real, imaginary last)"""
    x = q.float().reshape(*q.shape[:-1], -1, 2)
    out = torch.stack(
        (x[..., 0] * cs[..., 0] - x[..., 1] * cs[..., 1], x[..., 1] * cs[..., 0] + x[..., 0] * cs[..., 1]), -1
    )
    return out.flatten(-2).to(q.dtype)


def yarn_inv(d, factor, lo=1.0, hi=5.0):
    f = 10000.0 ** (torch.arange(0, d, 2, dtype=DT32) / d)
    ramp = torch.clamp((torch.arange(d // 2, dtype=DT32) - lo) / (hi - lo), 0, 1)
    keep = 1 - ramp
    return (1.0 / (factor * f)) * (1 - keep) + (1.0 / f) * keep


def llama3_inv(d, old=64):
    f = inv(d)
    w = 2 * math.pi / f
    sm = (old / w - 1.0) / 3.0
    return torch.where(w < old / 4.0, f, torch.where(w > old, f / 8.0, (1 - sm) * f / 8.0 + sm * f))


_lib = torch.library.Library("ropeprobe", "FRAGMENT")
_lib.define("rotate_(Tensor positions, Tensor(a!) q, Tensor table) -> ()")
_lib.define("rotate_seq(Tensor q, Tensor cos, Tensor sin, int offset) -> Tensor")


def _rotate_(positions, q, table):
    c, s = table[positions.flatten()].chunk(2, -1)
    q.copy_(use_half(q, c, s))


def _rotate_seq(q, cos, sin, offset):
    n = q.shape[0]
    return use_half(q, cos[offset : offset + n], sin[offset : offset + n])


_lib.impl("rotate_", _rotate_, "CPU")
_lib.impl("rotate_", lambda positions, q, table: None, "Meta")
_lib.impl("rotate_seq", _rotate_seq, "CPU")
_lib.impl("rotate_seq", lambda q, cos, sin, offset: torch.empty_like(q), "Meta")


# ============================================================ serving engines
@form("F01", "vLLM base: einsum, cat(cos|sin), cast, index_select")
class F01(Form):
    def freqs(self):
        return inv(self.rd)

    def table(self):
        t = torch.arange(self.rows, dtype=DT32)
        f = torch.einsum("i,j -> ij", t, self.freqs())
        return torch.cat((f.cos(), f.sin()), -1)

    def forward(self, positions, q):
        c, s = self.table().to(q.dtype).index_select(0, positions.flatten()).chunk(2, -1)
        return use_half(q, c, s)


@form("F02", "vLLM YaRN: float range end, cos*m, sin*m")
class F02(Form):
    def forward(self, positions, q):
        t = torch.arange(self.rows / 4 * 4.0, dtype=DT32)
        f = torch.einsum("i,j -> ij", t, yarn_inv(self.rd, 4.0))
        tab = torch.cat((f.cos() * 1.1386, f.sin() * 1.1386), -1).to(q.dtype)
        c, s = tab.index_select(0, positions).chunk(2, -1)
        return use_half(q, c, s)


def mrope_sections(rd):
    h = rd // 2
    a = h // 4
    b = (h - a) // 2
    return [a, b, h - a - b]


@form("F03", "vLLM MRoPE, sections: 4x rows, [3,N] index, split+select+cat", pos="3n")
class F03(F01):
    def forward(self, positions, q):
        cs = self.table().to(q.dtype)[positions]
        c, s = cs.chunk(2, -1)
        sec = mrope_sections(self.rd)
        c = torch.cat([m[i] for i, m in enumerate(c.split(sec, -1))], -1)
        s = torch.cat([m[i] for i, m in enumerate(s.split(sec, -1))], -1)
        return use_half(q, c, s)


@form("F04", "vLLM MRoPE, interleaved: [3,N] index, where(channel mask)", pos="3n")
class F04(F01):
    def forward(self, positions, q):
        c, s = self.table().to(q.dtype)[positions].chunk(2, -1)
        ch = torch.arange(self.rd // 2)
        h = (ch % 3 == 1) & (ch < 9)
        w = (ch % 3 == 2) & (ch < 9)

        def mix(x):
            return torch.where(w, x[2], torch.where(h, x[1], x[0]))

        return use_half(q, mix(c), mix(s))


@form("F05", "vLLM per-column MRoPE: index, split into width-1 columns, cat", pos="3n")
class F05(F01):
    def forward(self, positions, q):
        cs = self.table().to(q.dtype)[positions]
        pick = [0, 1, 2, 0, 1, 2, 0, 1] * (self.rd // 8)
        cs = torch.cat([m[pick[i]] for i, m in enumerate(cs.split([1] * self.rd, -1))], -1)
        c, s = cs.chunk(2, -1)
        return use_half(q, c, s)


@form("F06", "vLLM XD-RoPE: NTK-alpha base, [4,N] index, four sections", pos="4n")
class F06(F01):
    def freqs(self):
        return inv(self.rd, 10000.0 * 1000.0 ** (self.rd / (self.rd - 2)))

    def forward(self, positions, q):
        c, s = self.table().to(q.dtype)[positions].chunk(2, -1)
        sec = [self.rd // 8] * 4
        c = torch.cat([m[i] for i, m in enumerate(c.split(sec, -1))], -1)
        s = torch.cat([m[i] for i, m in enumerate(s.split(sec, -1))], -1)
        return use_half(q, c, s)


@form("F07", "vLLM linear scaling: several tables stacked on rows, index+offset")
class F07(Form):
    def forward(self, positions, q):
        f0, parts = inv(self.rd), []
        for k in (1.0, 4.0):
            t = torch.arange(self.rows * k, dtype=DT32) / k
            f = torch.einsum("i,j -> ij", t, f0)
            parts.append(torch.cat((f.cos(), f.sin()), -1))
        tab = torch.cat(parts, 0).to(q.dtype)
        c, s = tab.index_select(0, positions + self.rows).chunk(2, -1)
        return use_half(q, c, s)


@form("F08", "vLLM NTK variants: base from the row count, or log/exp mixed NTK")
class F08(Form):
    def forward(self, positions, q):
        half = self.rd // 2
        base = 10000.0 * ((2.0 * self.rows / 64) - 1.0) ** (self.rd / (self.rd - 2))
        a = torch.tensor(4.0).log() / half**0.625
        lam = (a * torch.arange(1, half + 1).float() ** 0.625).exp()
        f = torch.einsum("i,j -> ij", torch.arange(self.rows, dtype=DT32), inv(self.rd, base) / lam)
        c, s = torch.cat((f.cos(), f.sin()), -1).to(q.dtype).index_select(0, positions).chunk(2, -1)
        return use_half(q, c, s)


@form("F09", "llama3 scaling: where() chain on the frequencies")
class F09(F01):
    def freqs(self):
        return llama3_inv(self.rd)


@form("F10", "vLLM Phi-3 LongRoPE: two tables (short, long), cast each, cat rows, index+k")
class F10(Form):
    def part(self, n, fac, m):
        fr = 1.0 / (torch.tensor(fac, dtype=DT32) * (10000.0 ** (torch.arange(0, self.rd, 2, dtype=DT32) / self.rd)))
        f = torch.einsum("i,j -> ij", torch.arange(n, dtype=DT32), fr)
        return torch.cat((f.cos() * m, f.sin() * m), -1)

    def forward(self, positions, q):
        k, h = 64, self.rd // 2
        tab = torch.cat(
            (self.part(k, [1.0] * h, 1.0).to(q.dtype), self.part(self.rows, [2.0] * h, 1.19).to(q.dtype)), 0
        )
        idx = positions + torch.full_like(positions, k).long()
        c, s = torch.index_select(tab, 0, idx).chunk(2, -1)
        c, s = c.repeat(1, 2).unsqueeze(-2), s.repeat(1, 2).unsqueeze(-2)
        return use_full(q, c, s)


@form("F11", "DeepSeek YaRN: fp32 table, index, repeat_interleave after the gather")
class F11(Form):
    def forward(self, positions, q):
        t = torch.arange(self.rows / 40 * 40.0, dtype=DT32)
        f = torch.einsum("i,j -> ij", t, yarn_inv(self.rd, 40.0))
        tab = torch.cat((f.cos() * 1.0, f.sin() * 1.0), -1)
        c, s = tab[positions].chunk(2, -1)
        c = c.repeat_interleave(2, -1).unsqueeze(-2)
        s = s.repeat_interleave(2, -1).unsqueeze(-2)
        return use_pair(q, c, s).to(q.dtype)


@form("F12", "vLLM dual chunk: offset/clamp/modulo ranges, five tables, constant row")
class F12(Form):
    def forward(self, positions, q):
        size, fr = 64, inv(self.rd)  # configuration constants, independent of the row count
        n = size - 8
        ts = [
            torch.arange(n, dtype=DT32),
            (torch.arange(n, dtype=DT32) + n).clamp(max=size),
            torch.arange(self.rows, dtype=DT32) % n,
            torch.arange(n, dtype=DT32) + n,
            torch.arange(n, dtype=DT32) + size,
        ]
        tabs = []
        for t in ts:
            f = torch.outer(t, fr)
            tabs.append(torch.cat((f.cos(), f.sin()), -1).to(q.dtype))

        def ap(cs):
            c, s = cs.chunk(2, -1)
            return use_full(q, torch.cat((c, c), -1).unsqueeze(-2), torch.cat((s, s), -1).unsqueeze(-2))

        m = positions % n
        return (
            ap(tabs[2][positions]),
            ap(tabs[0][m]),
            ap(tabs[1][m]),
            ap(tabs[1][n - 1].repeat(positions.shape[0], 1)),
            ap(tabs[3][m]),
            ap(tabs[4][m]),
        )


@form("F13", "Llama4 vision: int32 range + sentinel row, %,//, strided, masked_fill, view_as_complex", q="bn1")
class F13(Form):
    def forward(self, positions, q):
        n = self.side
        idx = torch.arange(n * n, dtype=torch.int32).reshape(n * n, 1)
        idx = torch.cat([idx, idx[:1]], 0)
        idx[-1, -1] = -2
        fr = inv_cut(self.rd // 2)
        fx = (((idx % n) + 1)[..., None] * fr[None, None, :]).repeat_interleave(2, -1)
        fy = (((idx // n) + 1)[..., None] * fr[None, None, :]).repeat_interleave(2, -1)
        f = torch.cat([fx, fy], -1).float().contiguous()[..., ::2]
        f = f.masked_fill(idx.reshape(-1, 1, 1) < 0, 0)
        fc = torch.view_as_complex(torch.stack([torch.cos(f), torch.sin(f)], -1))
        return use_cplx(q, fc.view(1, n * n + 1, 1, self.rd // 2))


@form("F15", "Bailing MRoPE: int32 positions cast to long, index, where + temporal tail", pos="3n32")
class F15(F01):
    def forward(self, positions, q):
        c, s = self.table().to(q.dtype)[positions.to(torch.long)].chunk(2, -1)
        w = self.rd // 4
        even = (torch.arange(w) % 2 == 0).unsqueeze(0)

        def mix(x):
            return torch.cat((torch.where(even, x[1, :, :w], x[2, :, :w]), x[0, :, w:]), -1)

        return use_half(q, mix(c), mix(s))


@form("F16", "FoPE: cos/sin mixed by learned matrices, pad with 1, per-head table")
class F16(Form):
    def setup(self):
        k = self.rd // 2 - 2
        self.cc = nn.Parameter(torch.eye(k).repeat(2, 1, 1), requires_grad=False)
        self.sc = nn.Parameter(torch.eye(k).repeat(2, 1, 1), requires_grad=False)
        self.fr = nn.Buffer(inv(self.rd)[:k])

    def forward(self, positions, q):
        f = torch.einsum("j,i -> ji", torch.arange(self.rows, dtype=DT32), self.fr)
        pc, ps = f.cos().unsqueeze(0).expand(2, -1, -1), f.sin().unsqueeze(0).expand(2, -1, -1)
        s = torch.einsum("htD, hDd -> thd", ps, self.sc.float())
        c = torch.einsum("htD, hDd -> thd", pc, self.cc.float())
        pad = self.rd // 2 - c.shape[-1]
        s, c = F.pad(s, (0, pad), value=1.0), F.pad(c, (0, pad), value=1.0)
        tab = torch.cat((torch.cat((c, c), -1), torch.cat((s, s), -1)), -1).to(q.dtype)
        c, s = tab.index_select(0, positions).chunk(2, -1)
        return use_full(q, c, s)


@form("F17", "Gemma4 proportional: frequencies padded with zeros")
class F17(F01):
    def freqs(self):
        h = self.rd // 2
        e = torch.arange(0, h, 2, dtype=DT32) / self.rd
        return torch.cat((1.0 / (10000.0**e), torch.zeros(h - e.shape[0], dtype=DT32)))


@form("F18", "whole table handed to an opaque op that mutates q")
class F18(F01):
    def forward(self, positions, q):
        q = q.clone()
        torch.ops.ropeprobe.rotate_(positions, q, self.table().to(q.dtype))
        return q


@form("F20", "ViT angle table: outer, index by [N,2], flatten, cat, cos/sin after the gather", pos="hw")
class F20(Form):
    def setup(self):
        self.fr = nn.Buffer(inv(self.rd // 2))

    def forward(self, positions, q):
        f = torch.outer(torch.arange(self.rows, dtype=self.fr.dtype), self.fr)
        e = f[positions].flatten(1)
        e = torch.cat((e, e), -1)
        return use_full(q.float(), e.cos().unsqueeze(1), e.sin().unsqueeze(1)).to(q.dtype)


@form("F21", "openPangu: angle table grown to 2x and kept on self, slice, index", pos="hw")
class F21(Form):
    def setup(self):
        self.fr, self.n, self.kept = inv(self.rd // 2), 0, None

    def forward(self, positions, q):
        need = self.rows // 2
        if need > self.n:
            self.n = need * 2
            self.kept = torch.outer(torch.arange(self.n, dtype=self.fr.dtype), self.fr)
        e = self.kept[:need][positions].flatten(1).to(q.dtype)
        return use_half(q, e.cos(), e.sin())


@form("F22", "MoonViT/Kimi: flat range, %W, //W, outer, polar, cat, reshape, 2-D block slice")
class F22(Form):
    def forward(self, positions, q):
        n = self.side
        p = torch.arange(0, n * n).float()
        fr = 1.0 / (10000.0 ** (torch.arange(0, self.rd, 4)[: self.rd // 4].float() / self.rd))
        fx, fy = torch.outer(p % n, fr).float(), torch.outer(p // n, fr).float()
        zx, zy = torch.polar(torch.ones_like(fx), fx), torch.polar(torch.ones_like(fy), fy)
        tab = torch.cat([zx.unsqueeze(-1), zy.unsqueeze(-1)], -1).reshape(n, n, -1)
        fc = tab[:2, :3].reshape(-1, self.rd // 2).repeat(q.shape[0] // 6, 1)
        return use_cplx(q, fc.unsqueeze(-2))


@form("F23", "Pixtral/Mistral vision: even/odd frequencies, repeat, cat, polar, index (h,w)", pos="hw")
class F23(Form):
    def forward(self, positions, q):
        n, fr = self.side, 1.0 / (10000.0 ** (torch.arange(0, self.rd, 2).float() / self.rd))
        h, w = torch.arange(n), torch.arange(n)
        fh, fw = torch.outer(h, fr[::2]).float(), torch.outer(w, fr[1::2]).float()
        f = torch.cat([fh[:, None, :].repeat(1, n, 1), fw[None, :, :].repeat(n, 1, 1)], -1)
        tab = torch.polar(torch.ones_like(f), f)
        return use_cplx(q, tab[positions[:, 0], positions[:, 1]].unsqueeze(1))


@form("F24", "Step-VL ViT: in-place +1, zero row in front, index_select on dim 2")
class F24(Form):
    def forward(self, positions, q):
        n, fr = self.side, inv_cut(self.rd // 2)
        gh, gw = torch.arange(n, dtype=DT32), torch.arange(n, dtype=DT32)
        gh += 1
        gw += 1
        fh = torch.einsum("..., f -> ... f", gh, fr).repeat_interleave(2, -1)[:, None].expand(n, n, -1)
        fw = torch.einsum("..., f -> ... f", gw, fr).repeat_interleave(2, -1)[None, :].expand(n, n, -1)
        f = torch.cat([fw, fh], -1).reshape(n * n, -1)
        f = torch.cat([torch.zeros(1, f.shape[-1]), f], 0)[None, None]
        e = f.index_select(2, positions)
        x = q.transpose(0, 1).unsqueeze(0)
        return (x * e.cos() + rot_pair(x) * e.sin()).to(q.dtype)


@form("F25", "SGLang Phi-3: index offset from any(positions > k)")
class F25(F10):
    def forward(self, positions, q):
        k, h = 64, self.rd // 2
        tab = torch.cat(
            (self.part(k, [1.0] * h, 1.0).to(q.dtype), self.part(self.rows, [2.0] * h, 1.19).to(q.dtype)), 0
        )
        off = (torch.any(positions > k).float() * torch.full_like(positions, k)).long()
        c, s = torch.index_select(tab, 0, torch.add(positions, off)).chunk(2, -1)
        return use_full(q, c.repeat(1, 2).unsqueeze(-2), s.repeat(1, 2).unsqueeze(-2))


@form("F26", "TGI: lazy tables on self, t /= factor in place, two index_selects")
class F26(Form):
    def setup(self):
        self.fr, self.n, self.c, self.s = inv(self.rd), 0, None, None

    def forward(self, positions, q):
        if self.rows > self.n or self.c.dtype != q.dtype:
            self.n = self.rows
            t = torch.arange(self.rows, dtype=self.fr.dtype)
            t /= 2.0
            f = torch.outer(t, self.fr)
            self.c, self.s = torch.cos(f), torch.sin(f)
        c = torch.index_select(self.c, 0, positions)
        s = torch.index_select(self.s, 0, positions)
        return use_half(q, c, s)


@form("F28", "TGI MRoPE: index by [N,3], gather columns by a section index", pos="n3")
class F28(Form):
    def forward(self, positions, q):
        sec = mrope_sections(self.rd)
        si = torch.arange(3).repeat_interleave(torch.tensor(sec), output_size=self.rd // 2).view(1, 1, -1)
        f = torch.outer(torch.arange(self.rows, dtype=DT32), inv(self.rd))
        c, s = torch.cos(f).to(q.dtype), torch.sin(f).to(q.dtype)
        g = si.expand(self.rows, -1, -1)[: positions.shape[0]]
        c, s = c[positions].gather(1, g), s[positions].gather(1, g)
        a, b = q.chunk(2, -1)
        return torch.cat((a * c - b * s, b * c + a * s), -1)


@form("F29", "LMDeploy dynamic NTK: no table, max(positions) chooses the frequencies", pos="bs", q="bshd")
class F29(Form):
    def setup(self):
        self.fr = nn.Buffer(inv_int(self.rd))

    def forward(self, positions, q):
        n = torch.max(positions) + 1
        base = 10000.0 * ((2.0 * n / 64) - 1.0) ** (self.rd / (self.rd - 2))
        ntk = 1.0 / (base ** (torch.arange(0, self.rd, 2, dtype=torch.int64).float() / self.rd))
        fr = torch.where(n > 64, ntk, self.fr)
        f = (fr[None, :, None].expand(positions.shape[0], -1, 1) * positions[:, None, :].float()).transpose(1, 2)
        e = f.repeat(1, 1, 2)
        return use_full(q, e.cos().to(q.dtype).unsqueeze(2), e.sin().to(q.dtype).unsqueeze(2))


@form("F30", "TensorRT-LLM: numpy table as constant, [N,d/2,2], strided views, index", pos="3n")
class F30(Form):
    def setup(self):
        a = np.arange(self.rows, dtype=np.float32)[:, None] * inv(self.rd).numpy()[None]
        flat = np.stack((np.cos(a), np.sin(a)), -1).reshape(1, -1).astype(np.float32)
        self.tab = nn.Buffer(torch.from_numpy(flat))

    def forward(self, positions, q):
        t = self.tab.reshape(self.rows, self.rd // 2, 2)
        co, so = t[:, :, 0], t[:, :, 1]
        c, s = co[positions], so[positions]
        sec = mrope_sections(self.rd)
        c = torch.cat([m[i] for i, m in enumerate(c.split(sec, -1))], -1)
        s = torch.cat([m[i] for i, m in enumerate(s.split(sec, -1))], -1)
        return use_half(q, c, s)


@form("F31", "lightllm: range/factor with a fixed surplus of rows, outer, index_select + view")
class F31(Form):
    def forward(self, positions, q):
        t = torch.arange(self.rows + 128, dtype=DT32) / 2.0
        f = torch.outer(t, inv(self.rd))
        c, s = torch.cos(f).to(q.dtype), torch.sin(f).to(q.dtype)
        n = positions.shape[0]
        return use_half(
            q, torch.index_select(c, 0, positions).view(n, -1), torch.index_select(s, 0, positions).view(n, -1)
        )


@form("F32", "lightllm su / dynamic NTK: zeros then row-range writes (one frequency set per range)")
class F32_(Form):
    def forward(self, positions, q):
        k = self.rows - 3
        c = torch.zeros((self.rows, self.rd // 2), dtype=q.dtype)
        s = torch.zeros((self.rows, self.rd // 2), dtype=q.dtype)
        f = torch.outer(torch.arange(k, dtype=DT32), inv(self.rd))
        c[0:k, :] = torch.cos(f).to(q.dtype)
        s[0:k, :] = torch.sin(f).to(q.dtype)
        for i in range(k, self.rows):
            base = 10000.0 * (2.0 * (i + 1) / k - 1.0) ** (self.rd / (self.rd - 2))
            f = torch.outer(torch.tensor([i], dtype=DT32), inv(self.rd, base))
            c[i : i + 1, :] = torch.cos(f).to(q.dtype)
            s[i : i + 1, :] = torch.sin(f).to(q.dtype)
        return use_half(q, c.index_select(0, positions), s.index_select(0, positions))


@form("F34", "lightllm MRoPE: angle expanded to [3,S,D] before cos, index on dim 1")
class F34(Form):
    def forward(self, positions, q):
        f = torch.outer(torch.arange(self.rows, dtype=DT32) / 2.0, inv(self.rd)).unsqueeze(0).expand(3, -1, -1)
        f = torch.cat((f, f), -1)
        c, s = torch.cos(f).to(q.dtype), torch.sin(f).to(q.dtype)
        c, s = c[:, positions, :].unsqueeze(1), s[:, positions, :].unsqueeze(1)
        c, s = c[0, 0] + 0 * c[1, 0], s[2, 0]
        return use_full(q, c.unsqueeze(1), s.unsqueeze(1))


@form("F35", "flash-attn: lazy fp32 outer, cos/sin cast, whole tables to an opaque op")
class F35(Form):
    def setup(self):
        self.fr, self.n, self.c, self.s = nn.Buffer(inv(self.rd)), 0, None, None

    def forward(self, positions, q):
        need = self.rows
        if need > self.n or self.c.dtype != q.dtype:
            self.n = need
            f = torch.outer(torch.arange(need, dtype=DT32), self.fr)
            self.c, self.s = torch.cos(f).to(q.dtype), torch.sin(f).to(q.dtype)
        return torch.ops.ropeprobe.rotate_seq(q, self.c, self.s, 2)


@form("F38", "exllama: t /= factor, cat, [1,1,S,D] fp16 tables, opaque consumer", qdtype=HF)
class F38(Form):
    def forward(self, positions, q):
        t = torch.arange(self.rows, dtype=DT32)
        t /= 2.0
        f = torch.einsum("i,j->ij", t, inv_int(self.rd))
        e = torch.cat((f, f), -1)
        s, c = e.sin()[None, None].half(), e.cos()[None, None].half()
        h = self.rd // 2
        return torch.ops.ropeprobe.rotate_seq(q, c[0, 0, :, :h].contiguous(), s[0, 0, :, :h].contiguous(), 3)


# ============================================================ transformers 5.x
@form("F39", "transformers 5 template: no table (must be left alone)", pos="bs", q="bshd")
class F39(Form):
    def setup(self):
        self.fr = nn.Buffer(inv(self.rd), persistent=False)

    def forward(self, positions, q):
        with torch.no_grad():
            f = positions[..., None].float() * self.fr.to(dtype=DT32)
            e = torch.cat((f, f), -1)
            c, s = (e.cos() * 1.0).to(q.dtype), (e.sin() * 1.0).to(q.dtype)
        return use_full(q, c.unsqueeze(2), s.unsqueeze(2))


@form("F40", "transformers 5 Llama4/DeepSeek-V2 text: polar of positions, no table", pos="bs", q="bshd")
class F40(Form):
    def setup(self):
        self.fr = nn.Buffer(inv(self.rd), persistent=False)

    def forward(self, positions, q):
        f = positions[..., None].float() * self.fr
        fc = torch.polar(torch.ones_like(f), f) * 1.0
        return use_cplx(q, fc.unsqueeze(2))


@form("F42", "wav2vec2 family: stack((cos,sin)) on dim 0 kept on self, slice", pos="bs", q="bshd")
class F42(Form):
    def setup(self):
        self.fr, self.n, self.kept = nn.Buffer(inv_int(self.rd)), None, None

    def forward(self, positions, q):
        if not (self.rows == self.n and self.kept is not None):
            self.n = self.rows
            f = torch.arange(self.rows).type_as(self.fr)[:, None] * self.fr
            e = torch.cat((f, f), -1)
            self.kept = torch.stack([e.cos()[:, None, None, :], e.sin()[:, None, None, :]]).type_as(q)
        x = q.transpose(0, 1)
        n = x.shape[0]
        return use_full(x, self.kept[0, :n, ...], self.kept[1, :n, ...]).transpose(0, 1)


@form("F43", "CLVP: angle table kept on self, cos/sin over the whole table, squeeze, index", pos="bs", q="bshd")
class F43(Form):
    def setup(self):
        self.fr, self.n, self.kept = nn.Buffer(inv_int(self.rd)), None, None

    def forward(self, positions, q):
        if not (self.rows == self.n and self.kept is not None):
            self.n = self.rows
            f = torch.arange(self.rows).type_as(self.fr)[:, None] * self.fr
            self.kept = torch.cat((f, f), -1).unsqueeze(0)
        c, s = self.kept.cos().squeeze(0), self.kept.sin().squeeze(0)
        c, s = c[positions].unsqueeze(1), s[positions].unsqueeze(1)
        return use_full(q.transpose(1, 2), c, s)


@form("F44", "EfficientLoFTR: positions from cumsum of ones, strided writes into zeros")
class F44(Form):
    def setup(self):
        self.fr = nn.Buffer(inv(self.rd // 2))

    def forward(self, positions, q):
        n = self.side
        i = torch.ones(n, n, dtype=DT32).cumsum(0).unsqueeze(-1)
        j = torch.ones(n, n, dtype=DT32).cumsum(1).unsqueeze(-1)
        e = torch.zeros(1, n, n, self.rd // 2)
        e[:, :, :, 0::2] = i * self.fr
        e[:, :, :, 1::2] = j * self.fr
        c = e.cos().repeat_interleave(2, -1).to(q.dtype)
        s = e.sin().repeat_interleave(2, -1).to(q.dtype)
        m = q.shape[0]
        x = q.transpose(0, 1)
        return use_pair(x, c.reshape(-1, self.rd)[:m], s.reshape(-1, self.rd)[:m])


@form("F45", "MusicFlamingo: angle table sliced, then multiplied by data before cos", pos="ns")
class F45(Form):
    def setup(self):
        self.fr = nn.Buffer(inv(self.rd))

    def forward(self, positions, q):
        tab = ((torch.arange(self.rows, dtype=DT32) / self.rows)[:, None] * self.fr).repeat_interleave(2, -1)
        a = tab[: q.shape[0]] * (-positions.float() * 2 * math.pi)[:, None]
        return use_pair(q.float(), a.cos().unsqueeze(1), a.sin().unsqueeze(1)).to(q.dtype)


@form("F46", "additive sinusoid with a zero row in front (near miss: added, not rotated)")
class F46(Form):
    def forward(self, positions, q):
        f = torch.outer(torch.arange(self.rows, dtype=DT32), inv_int(self.rd))
        tab = torch.cat([f.sin(), f.cos()], 1)
        tab = torch.cat([tab.new_zeros(1, self.rd), tab])
        return q + tab[positions].unsqueeze(1)


@form("F48", "transformers 5 LongRoPE: inv_freq buffer overwritten in forward by where(max)", pos="bs", q="bshd")
class F48(Form):
    def setup(self):
        self.fr = nn.Buffer(inv(self.rd), persistent=False)
        self.short = nn.Buffer(inv(self.rd), persistent=False)
        self.long = nn.Buffer(inv(self.rd) / 2, persistent=False)

    def forward(self, positions, q):
        n = torch.max(positions) + 1
        self.fr.copy_(torch.where(n > 64, self.long, self.short))
        f = positions[..., None].float() * self.fr
        e = torch.cat((f, f), -1)
        return use_full(q, e.cos().to(q.dtype).unsqueeze(2), e.sin().to(q.dtype).unsqueeze(2))


# ============================================================ remote-code models
@form("F49", "HF 4.3x: [1,1,S,D] buffers, slice, cast, squeeze twice, index", pos="bs", q="bshd")
class F49(Form):
    def setup(self):
        self.fr = nn.Buffer(inv_int(self.rd))

    def forward(self, positions, q):
        t = torch.arange(self.rows, dtype=self.fr.dtype)
        f = torch.einsum("i,j->ij", t, self.fr)
        e = torch.cat((f, f), -1)
        c, s = e.cos()[None, None, :, :], e.sin()[None, None, :, :]
        n = self.rows // 2
        c, s = c[:, :, :n, ...].to(q.dtype), s[:, :, :n, ...].to(q.dtype)
        c, s = c.squeeze(1).squeeze(0), s.squeeze(1).squeeze(0)
        c, s = c[positions].unsqueeze(1), s[positions].unsqueeze(1)
        return use_full(q.transpose(1, 2), c, s)


@form("F50", "HF 4.36+: [S,D] tables re-registered in forward, slice, cast, index", pos="bs", q="bshd")
class F50(Form):
    def setup(self):
        self.fr = nn.Buffer(inv_int(self.rd), persistent=False)
        self.n = None
        self.cos_cached = nn.Buffer(torch.zeros(1, self.rd), persistent=False)
        self.sin_cached = nn.Buffer(torch.zeros(1, self.rd), persistent=False)

    def forward(self, positions, q):
        n = self.rows
        if self.n is None or n > self.n:
            self.n = n
            f = torch.outer(torch.arange(n).to(self.fr.dtype), self.fr)
            e = torch.cat((f, f), -1)
            self.cos_cached, self.sin_cached = e.cos().to(q.dtype), e.sin().to(q.dtype)
        c, s = self.cos_cached[:n].to(q.dtype), self.sin_cached[:n].to(q.dtype)
        return use_full(q.transpose(1, 2), c[positions].unsqueeze(1), s[positions].unsqueeze(1))


@form("F51", "HF dynamic NTK / XVERSE: base depends on the row count", pos="bs", q="bshd")
class F51(Form):
    def forward(self, positions, q):
        n = self.rows
        base = 10000.0 * (n / 32.0 - 1.0) ** (self.rd / (self.rd - 2))
        f = torch.einsum("i,j->ij", torch.arange(n, dtype=DT32), inv_int(self.rd, base))
        e = torch.cat((f, f), -1)
        c, s = e.cos()[None, None, :, :], e.sin()[None, None, :, :]
        c, s = c[:, :, :n, ...].to(q.dtype), s[:, :, :n, ...].to(q.dtype)
        c, s = c.squeeze(1).squeeze(0), s.squeeze(1).squeeze(0)
        return use_full(q.transpose(1, 2), c[positions].unsqueeze(1), s[positions].unsqueeze(1))


@form("F53", "Yuan YaRN: float64 positions from numpy, float64 outer, mscale, [1,1,S,D]", pos="bs", q="bshd")
class F53(Form):
    def setup(self):
        self.fr = nn.Buffer(yarn_inv(self.rd, 4.0))

    def forward(self, positions, q):
        t = torch.arange(self.rows, dtype=DT64)
        f = torch.outer(t, self.fr.to(t.dtype))
        e = torch.cat((f, f), -1)
        c, s = (e.cos() * 1.1386)[None, None].to(DT32), (e.sin() * 1.1386)[None, None].to(DT32)
        c, s = c.to(q.dtype).squeeze(1).squeeze(0), s.to(q.dtype).squeeze(1).squeeze(0)
        return use_full(q.transpose(1, 2), c[positions].unsqueeze(1), s[positions].unsqueeze(1))


@form("F54", "ChatGLM2/3, GLM-4: stack on the last dim, cast, index, transpose+contiguous, view", pos="bs", q="bshd")
class F54(Form):
    def forward(self, positions, q):
        th = 1.0 / (500000.0 ** (torch.arange(0, self.rd, 2, dtype=DT32) / self.rd))
        f = torch.outer(torch.arange(self.rows, dtype=DT32), th).float()
        tab = torch.stack([torch.cos(f), torch.sin(f)], -1).bfloat16()
        r = tab[positions].transpose(0, 1).contiguous()
        x = q.transpose(0, 1)
        sq = x.shape[0]
        r = r[:sq].view(sq, -1, 1, self.rd // 2, 2)
        x = x.reshape(sq, -1, x.shape[2], self.rd // 2, 2)
        out = torch.stack(
            [x[..., 0] * r[..., 0] - x[..., 1] * r[..., 1], x[..., 1] * r[..., 0] + x[..., 0] * r[..., 1]], -1
        )
        return out.flatten(3)


@form("F56", "Qwen-1: table grown to 2x, [1,S,1,D], slice [offset:offset+len] of two aliases", pos="bs", q="bshd")
class F56(Form):
    def setup(self):
        self.n, self.kept = 0, None
        self.fr = inv_int(self.rd)

    def forward(self, positions, q):
        off, n = 3, q.shape[1]
        need = self.rows // 2
        if need > self.n:
            self.fr = inv_int(self.rd, 10000.0 * 2.0 ** (self.rd / (self.rd - 2)))
            self.n = max(2 * need, 16)
            f = torch.outer(torch.arange(self.n).type_as(self.fr), self.fr)
            e = torch.cat((f, f), -1)[None, :, None, :]
            self.kept = [e.cos(), e.sin()]
        c, s = self.kept
        c, s = c[:, off : off + n], s[:, off : off + n]
        return use_full(q.float(), c, s).type_as(q)


@form("F57", "SAT/CogVLM: separate half tables kept on self, opaque consumer with position ids")
class F57(Form):
    def setup(self):
        self.n = 0
        self.fr = inv_int(self.rd)

    def forward(self, positions, q):
        if self.rows > self.n:
            self.n = self.rows
            f = torch.einsum("i,j->ij", torch.arange(self.rows, dtype=DT32), self.fr)
            self.c, self.s = torch.cos(f).to(q.dtype), torch.sin(f).to(q.dtype)
        out = q.clone()
        torch.ops.ropeprobe.rotate_(positions, out, torch.cat((self.c, self.s), -1))
        return out


@form("F58", "EVA/CogVLM ViT: range/ft*pt, repeat, broadcast cat over a grid, whole-table multiply", q="grid")
class F58(Form):
    def forward(self, positions, q):
        n = self.side
        t = torch.arange(n) / n * 4
        f = torch.einsum("..., f -> ... f", t, inv_cut(self.rd // 2)).repeat_interleave(2, -1)
        f = torch.cat(torch.broadcast_tensors(f[:, None, :], f[None, :, :]), -1)
        c, s = f.cos().view(-1, self.rd), f.sin().view(-1, self.rd)
        return (q * c + rot_pair(q) * s).to(q.dtype)


@form("F59", "Falcon RW: rebuilt when the length differs, [1,S,D] cast, whole-table multiply", q="hsd")
class F59(Form):
    def setup(self):
        self.n, self.fr = None, nn.Buffer(inv_int(self.rd), persistent=False)

    def forward(self, positions, q):
        n = q.shape[1]
        if n != self.n:
            self.n = n
            f = torch.einsum("i,j->ij", torch.arange(n).type_as(self.fr), self.fr)
            e = torch.cat((f, f), -1).float()
            self.c, self.s = e.cos()[None].type(q.dtype), e.sin()[None].type(q.dtype)
        return use_full(q, self.c, self.s)


@form("F60", "ESM: [1,S,D] tables, prefix slice [:, :len, :]", q="hsd")
class F60(Form):
    def setup(self):
        self.fr = nn.Buffer(inv_int(self.rd))

    def forward(self, positions, q):
        f = torch.einsum("i,j->ij", torch.arange(self.rows).type_as(self.fr), self.fr)
        e = torch.cat((f, f), -1)
        c, s = e.cos()[None, :, :], e.sin()[None, :, :]
        return use_full(q, c[:, : q.shape[1], :], s[:, : q.shape[1], :])


@form(
    "F61",
    "old GPT-J / AutoGPTQ / torchscale: duplicate by view(-1,1).repeat(1,2), slice from offset",
    pos="bs",
    q="bshd",
)
class F61(Form):
    def forward(self, positions, q):
        fr = 1.0 / (10000 ** (torch.arange(0, self.rd, 2) / self.rd))
        f = torch.einsum("i , j -> i j", torch.arange(self.rows, dtype=DT32), fr).float()

        def dup(m):
            return m.view(-1, 1).repeat(1, 2).view(m.shape[0], -1)

        off, n = 2, q.shape[1]
        s, c = (dup(t)[None, off : off + n, None, :] for t in (torch.sin(f), torch.cos(f)))
        return use_pair(q, c, s)


@form("F62", "Phi-1.5: half tables, open slice [off:] then [:len], unsqueeze, fp32", pos="bs", q="bshd")
class F62(Form):
    def forward(self, positions, q):
        f = torch.outer(torch.arange(self.rows, dtype=DT32), inv(self.rd))
        c, s = torch.cos(f).to(q.dtype), torch.sin(f).to(q.dtype)
        c, s = c[2:][: q.shape[1]], s[2:][: q.shape[1]]
        c, s = c.unsqueeze(1).float(), s.unsqueeze(1).float()
        a, b = q.float().chunk(2, -1)
        return torch.cat((a * c - b * s, a * s + b * c), -1).to(q.dtype)


@form("F63", "OpenELM/OLMo: slice [..., k-q:k, :] of a [1,1,S,D] table", pos="bs", q="bhsd")
class F63(Form):
    def forward(self, positions, q):
        f = torch.einsum("i,j->ij", torch.arange(self.rows, dtype=DT32), inv(self.rd))
        e = torch.cat((f, f), -1)
        c, s = e.cos().to(DT32)[None, None], e.sin().to(DT32)[None, None]
        kl, ql = 9, q.shape[2]
        return use_full(q.float(), c[..., kl - ql : kl, :], s[..., kl - ql : kl, :]).type_as(q)


# ============================================================ training frameworks
@form("F64", "LLaMA reference / DeepSeek-V3 / torchtitan: int64 range, outer, polar, slice [p:p+n]", pos="bs", q="bshd")
class F64(Form):
    def forward(self, positions, q):
        f = torch.outer(torch.arange(self.rows), inv_cut(self.rd)).float()
        fc = torch.polar(torch.ones_like(f), f)[2 : 2 + q.shape[1]]
        return use_cplx(q, fc.view(1, q.shape[1], 1, self.rd // 2))


@form("F65", "Mistral / gemma_pytorch: complex table (2x rows), index by positions")
class F65(Form):
    def forward(self, positions, q):
        f = torch.outer(torch.arange(self.rows), inv_cut(self.rd) / 2).float()
        fc = torch.polar(torch.ones_like(f), f).index_select(0, positions)
        return use_cplx(q, fc[:, None, :])


@form("F66", "torchtitan CosSin / torchtune Phi-3: cat(f,f) then cat(cos|sin) [S,2D], index, view", pos="bs", q="bshd")
class F66(Form):
    def forward(self, positions, q):
        fr = inv_cut(self.rd)
        f = torch.outer(torch.arange(self.rows, dtype=fr.dtype), fr).float()
        th = torch.cat([f, f], -1)
        tab = torch.cat([th.cos(), th.sin()], -1)
        r = tab[positions].view(-1, q.shape[1], 1, 2 * self.rd)
        return use_full(q, r[..., : self.rd], r[..., self.rd :]).type_as(q)


@form("F67", "torchtune / lit-llama: einsum, stack on the last dim, index or slice, view", pos="bs", q="bshd")
class F67(Form):
    def setup(self):
        self.th = nn.Buffer(inv_cut(self.rd), persistent=False)

    def forward(self, positions, q):
        f = torch.einsum("i, j -> ij", torch.arange(self.rows, dtype=self.th.dtype), self.th).float()
        tab = torch.stack([torch.cos(f), torch.sin(f)], -1)
        r = tab[positions].view(-1, q.shape[1], 1, self.rd // 2, 2)
        return use_ri(q, r)


@form("F68", "torchtune ViT: float range + sentinel -1 by cat, %,//, masked_fill, stack, whole table", q="bn1")
class F68(Form):
    def setup(self):
        self.th = nn.Buffer(inv_cut(self.rd // 2), persistent=False)

    def forward(self, positions, q):
        n = self.side
        p = torch.arange(n * n, dtype=DT32)
        p = torch.cat([p, -1 * torch.ones(1, dtype=DT32)])
        fx = torch.einsum("i, j -> ij", p % n + 1, self.th).float()
        fy = torch.einsum("i, j -> ij", p // n + 1, self.th).float()
        f = torch.cat([fx, fy], -1).masked_fill(p.unsqueeze(-1) < 0, 0)
        tab = torch.stack([torch.cos(f), torch.sin(f)], -1)
        return use_ri(q, tab.view(1, n * n + 1, 1, self.rd // 2, 2))


@form(
    "F69",
    "litgpt: range/ratio, outer.repeat(1,2), local/global stacked last, index_select, [..., 0]",
    pos="bs",
    q="bshd",
)
class F69(Form):
    def forward(self, positions, q):
        t = torch.arange(self.rows).float() / 1
        a = torch.outer(t, inv_int(self.rd)).repeat(1, 2)
        b = torch.outer(t, inv_int(self.rd, 1e6)).repeat(1, 2)
        f = torch.stack((a, b), -1)
        c, s = torch.cos(f) * 1.0, torch.sin(f) * 1.0
        i = positions.reshape(-1)
        c = torch.index_select(c, 0, i).view(*positions.shape, self.rd, 2)[..., 0].unsqueeze(2)
        s = torch.index_select(s, 0, i).view(*positions.shape, self.rd, 2)[..., 0].unsqueeze(2)
        return use_full(q, c, s).to(q.dtype)


@form(
    "F71",
    "Megatron: lru_cache method, range+offset, *= 1/f in place, outer, cat, [:,None,None,:], cos/sin at use",
    q="shd",
)
class F71(Form):
    def setup(self):
        self.fr = inv(self.rd)

    @functools.lru_cache(maxsize=32)  # noqa: B019  (Dynamo inlines through it: the build stays in the graph)
    def angles(self, n, offset=0):
        t = torch.arange(n, dtype=self.fr.dtype) + offset
        t *= 1 / 2.0
        f = torch.outer(t, self.fr)
        return torch.cat((f, f), -1)[:, None, None, :]

    def forward(self, positions, q):
        e = self.angles(self.rows, 5)
        x = q.unsqueeze(1)
        e = e[: x.shape[0]]
        c, s = torch.cos(e).to(q.dtype), torch.sin(e).to(q.dtype)
        return use_full(x, c, s)


@form("F72", "NeMo: int range+offset, type_as, scale from the row count, einsum", q="shd")
class F72(Form):
    def setup(self):
        self.fr = nn.Buffer(inv_int(self.rd))

    def forward(self, positions, q):
        t = (torch.arange(self.rows) + 0).type_as(self.fr)
        t *= 1 / (self.rows / 64.0)
        f = torch.einsum("i , j -> i j", t, self.fr)
        e = torch.cat((f, f), -1)[:, None, None, :][: q.shape[0]]
        return use_full(q.unsqueeze(1), e.cos(), e.sin())


@form("F73", "GPT-NeoX: [S,1,1,D] tables, cast, slice twice (len, then offset)", q="shd")
class F73(Form):
    def forward(self, positions, q):
        fr = inv_int(self.rd)
        f = torch.einsum("i,j->ij", torch.arange(self.rows).type_as(fr), fr)
        e = torch.cat((f, f), -1)
        c, s = e.cos()[:, None, None, :].to(HF), e.sin()[:, None, None, :].to(HF)
        n = self.rows // 2
        c, s = c[:n, ...], s[:n, ...]
        k = q.shape[0]
        c, s = c[1 : k + 1, ...], s[1 : k + 1, ...]
        return use_full(q.unsqueeze(1), c.to(q.dtype), s.to(q.dtype))


@form("F74", "nanotron: polar, view_as_real, copied into a float buffer, index, view_as_complex", pos="bs", q="bshd")
class F74(Form):
    def setup(self):
        self.buf = nn.Buffer(torch.empty(self.rows, self.rd // 2, 2), persistent=False)

    def forward(self, positions, q):
        f = torch.outer(torch.arange(self.rows), inv(self.rd)[: self.rd // 2]).float()
        self.buf.copy_(torch.view_as_real(torch.polar(torch.ones_like(f), f)))
        fc = torch.view_as_complex(self.buf[positions][:, :, None, :])
        return use_cplx(q, fc)


@form("F75", "OLMo: table kept in a dict, autocast off, [1,1,S,D], slices by key/query length", pos="bs", q="bhsd")
class F75(Form):
    def setup(self):
        self.box = {}

    def forward(self, positions, q):
        ql, kl = q.shape[2], 9
        if "s" not in self.box:
            with torch.autocast("cpu", enabled=False):
                f = torch.einsum("i , j -> i j", torch.arange(self.rows, dtype=DT32), inv(self.rd))
                e = torch.cat((f, f), -1)
                self.box["s"], self.box["c"] = e.sin()[None, None], e.cos()[None, None]
        s, c = self.box["s"][:, :, :kl, :], self.box["c"][:, :, :kl, :]
        with torch.autocast("cpu", enabled=False):
            x = q.float()
            return use_full(x, c[:, :, kl - ql : kl, :].type_as(x), s[:, :, kl - ql : kl, :].type_as(x)).type_as(q)


@form("F76", "fairseq2: pad row 0, polar(out=) into a complex view of rows [1:], index + 1", pos="bs", q="bshd")
class F76(Form):
    def forward(self, positions, q):
        buf = torch.empty((self.rows + 1, self.rd // 2, 2), dtype=DT32)
        buf[0] = 0.0
        f = torch.outer(torch.arange(self.rows, dtype=DT32), inv(self.rd))
        torch.polar(torch.ones_like(f), f, out=torch.view_as_complex(buf[1:]))
        fc = torch.view_as_complex(buf)[positions + 1]
        return use_cplx(q, fc.unsqueeze(2))


@form(
    "F78", "x-transformers: einsum/factor, stack pairs, tail slice [-n:], xPos scale from t.max()", pos="bs", q="bhsd"
)
class F78(Form):
    def setup(self):
        self.fr = nn.Buffer(inv_int(self.rd))
        self.sc = nn.Buffer((torch.arange(0, self.rd, 2) + 0.4 * self.rd) / (1.4 * self.rd))

    def forward(self, positions, q):
        t = torch.arange(self.rows)
        top = t.max() + 1
        t = t[None]
        f = torch.einsum("b i , j -> b i j", t.type_as(self.fr), self.fr) / 2.0
        f = torch.stack((f, f), -1).flatten(-2)
        p = (t - (top // 2)) / 512
        z = self.sc ** p[..., None]
        z = torch.stack((z, z), -1).flatten(-2)
        n = q.shape[-2]
        f, z = f[:, -n:, :][:, None], z[:, -n:, :][:, None]
        return ((q * f.cos() * z) + (rot_pair(q) * f.sin() * z)).to(q.dtype)


@form("F79", "rotary-embedding-torch: learned frequencies, angle table written into a buffer slice", pos="bs", q="bhsd")
class F79(Form):
    def setup(self):
        self.fr = nn.Parameter(inv_cut(self.rd), requires_grad=False)
        self.buf = nn.Buffer(torch.zeros(self.rows, self.rd), persistent=False)

    def forward(self, positions, q):
        t = (torch.arange(self.rows, dtype=DT32) + 0) / 1.0
        f = torch.einsum("..., f -> ... f", t.type(self.fr.dtype), self.fr).repeat_interleave(2, -1)
        self.buf[: self.rows] = f.detach()
        f = f[-q.shape[-2] :]
        return ((q * f.cos() * 1.0) + (rot_pair(q) * f.sin() * 1.0)).type(q.dtype)


@form("F80", "lingua: stack(cos,-sin,sin,cos) viewed as 2x2, index/slice, broadcast mul + sum", pos="bs", q="bshd")
class F80(Form):
    def forward(self, positions, q):
        f = torch.outer(torch.arange(self.rows), inv_cut(self.rd)).float()
        c, s = f.cos(), f.sin()
        tab = torch.stack((c, -s, s, c), -1).view(*f.size(), 2, 2)
        r = tab[: q.shape[1]].view(1, q.shape[1], 1, self.rd // 2, 2, 2).float()
        x = q.reshape(*q.shape[:-1], -1, 1, 2)
        return (x * r).sum(5).flatten(3).type_as(q)


@form("F81", "nanochat: bf16 half tables [1,S,1,d/2], slice [T0:T0+T]", pos="bs", q="bshd")
class F81(Form):
    def forward(self, positions, q):
        f = torch.outer(torch.arange(self.rows, dtype=DT32), inv(self.rd, 100000.0))
        c, s = f.cos().to(BF), f.sin().to(BF)
        c, s = c[None, :, None, :], s[None, :, None, :]
        n = q.shape[1]
        c, s = c[:, 2 : 2 + n], s[:, 2 : 2 + n]
        a, b = q.chunk(2, -1)
        return torch.cat((a * c + b * s, a * (-s) + b * c), -1)


@form("F82", "modded-nanogpt: linspace frequencies with zeros, bf16, strided in-place sign flip", pos="bs", q="bshd")
class F82(Form):
    def forward(self, positions, q):
        w = (1 / 1024) ** torch.linspace(0, 1, steps=self.rd // 4, dtype=DT32)
        w = w.repeat_interleave(2)
        w = torch.cat([w, w.new_zeros(self.rd // 2)])
        f = torch.outer(torch.arange(2 * self.rows, dtype=DT32), w)
        c, s = f.cos().to(BF), f.sin().to(BF)
        s[..., 1::2] *= -1
        n = q.shape[1]
        c, s = c[None, :n, None, :], s[None, :n, None, :]
        flip = q.view(*q.shape[:-1], q.shape[-1] // 2, 2).flip(-1).view(q.shape)
        return c * q + s * flip


@form("F83", "torchscale xPos: negative start range for the scale, tail slices, duplicate", q="hsd")
class F83(Form):
    def setup(self):
        self.sc = nn.Buffer((torch.arange(0, self.rd, 2) + 0.4 * self.rd) / (1.4 * self.rd))

    def forward(self, positions, q):
        n, total = q.shape[1], self.rows
        lo = -total // 2
        z = self.sc ** torch.arange(lo, total + lo, 1).to(self.sc).div(512)[:, None]
        fr = 1.0 / (10000 ** (torch.arange(0, self.rd // 2) / (self.rd // 2)))
        f = torch.einsum("i , j -> i j", torch.arange(0, total, dtype=DT32), fr).to(z)
        s, c = torch.sin(f), torch.cos(f)
        z, s, c = z[-n:], s[-n:], c[-n:]

        def dup(m):
            return m.view(-1, 1).repeat(1, 2).view(m.shape[0], -1)

        return use_pair(q, dup(c * z), dup(s * z))


@form("F84", "RetNet: linspace exponent, duplicated angles, range[:,None]*angle[None]", q="hsd")
class F84(Form):
    def setup(self):
        a = 1.0 / (10000 ** torch.linspace(0, 1, self.rd // 2))
        self.an = nn.Buffer(a.unsqueeze(-1).repeat(1, 2).flatten())

    def forward(self, positions, q):
        i = torch.arange(self.rows).to(self.an)
        s = torch.sin(i[:, None] * self.an[None, :])
        c = torch.cos(i[:, None] * self.an[None, :])
        return use_pair(q, c[: q.shape[1]], s[: q.shape[1]])


@form("F85", "ExecuTorch: half tables, narrow from a start read out of the position tensor", pos="ns", q="1shd")
class F85(Form):
    def forward(self, positions, q):
        f = torch.outer(torch.arange(self.rows), inv_cut(self.rd)).float()
        c, s = torch.cos(f), torch.sin(f)
        k = positions[0].item()
        torch._check(k >= 0)
        n = q.shape[1]
        torch._check(k + n <= self.rows)
        c, s = c.narrow(0, k, n), s.narrow(0, k, n)
        xr, xi = q.float().reshape(*q.shape[:-1], -1, 2).unbind(-1)
        c, s = c.view(1, n, 1, -1), s.view(1, n, 1, -1)
        return torch.stack([xr * c - xi * s, xr * s + xi * c], -1).flatten(3).type_as(q)


@form("F86", "timm: meshgrid, /f*r, grid*bands, sin first, repeat_interleave, cat, whole or gather", q="grid")
class F86(Form):
    def forward(self, positions, q):
        n = self.side
        t = [(torch.arange(n, dtype=torch.int64).to(DT32) + 0.0) / n * 4 for _ in range(2)]
        bands = 1.0 / (10000.0 ** (torch.arange(0, self.rd // 4, 1, dtype=torch.int64).to(DT32) / (self.rd // 4)))
        g = torch.stack(torch.meshgrid(t, indexing="ij"), -1).unsqueeze(-1)
        p = g * bands
        s, c = p.sin(), p.cos()
        s = s.reshape(n * n, -1).repeat_interleave(2, -1)
        c = c.reshape(n * n, -1).repeat_interleave(2, -1)
        emb = torch.cat([s, c], -1)
        s, c = emb.chunk(2, -1)
        return (q * c + rot_pair(q) * s).to(q.dtype)


@form("F87", "SAM2: flat range, %, div(floor), outer, polar, cat, whole-table complex multiply", q="grid")
class F87(Form):
    def forward(self, positions, q):
        n = self.side
        t = torch.arange(n * n, dtype=DT32)
        tx, ty = (t % n).float(), torch.div(t, n, rounding_mode="floor").float()
        fr = 1.0 / (10000.0 ** (torch.arange(0, self.rd, 4)[: self.rd // 4].float() / self.rd))
        fx, fy = torch.outer(tx, fr), torch.outer(ty, fr)
        fc = torch.cat([torch.polar(torch.ones_like(fx), fx), torch.polar(torch.ones_like(fy), fy)], -1)
        return use_cplx(q, fc.view(1, n * n, self.rd // 2))


# ============================================================ diffusion transformers
@form("F88", "Flux/HiDream: no table, float64 positions per token, 2x2 stack, float at the end", pos="nf")
class F88(Form):
    def forward(self, positions, q):
        p = positions.to(DT64)
        om = 1.0 / (10000.0 ** (torch.arange(0, self.rd, 2, dtype=DT64) / self.rd))
        f = torch.einsum("...n,d->...nd", p, om)
        r = torch.stack([torch.cos(f), -torch.sin(f), torch.sin(f), torch.cos(f)], -1)
        r = r.view(*f.shape, 2, 2).float().unsqueeze(1)
        x = q.float().reshape(*q.shape[:-1], -1, 1, 2)
        return (r[..., 0] * x[..., 0] + r[..., 1] * x[..., 1]).reshape(q.shape).type_as(q)


@form("F89", "HunyuanVideo: linspace/range meshgrid, outer per axis, repeat_interleave, cat, whole", q="grid")
class F89(Form):
    def forward(self, positions, q):
        n = self.side
        ax = [torch.linspace(0, n, n + 1, dtype=DT32)[:n], torch.arange(0, n, dtype=DT32)]
        g = torch.stack(torch.meshgrid(*ax, indexing="ij"), 0)
        cs, ss = [], []
        for i in range(2):
            f = torch.outer(g[i].reshape(-1) * 1.0, inv_cut(self.rd // 2, 256.0))
            cs.append(f.cos().repeat_interleave(2, 1))
            ss.append(f.sin().repeat_interleave(2, 1))
        c, s = torch.cat(cs, 1), torch.cat(ss, 1)
        return (q.float() * c + rot_pair(q).float() * s).to(q.dtype)


@form("F90", "Wan 2.1: int64 range x float64, complex128 polar, per-axis split/slice/view/expand", q="1shd")
class F90(Form):
    def tab(self, n, d):
        w = 1.0 / torch.pow(10000, torch.arange(0, d, 2).to(DT64).div(d))
        f = torch.outer(torch.arange(n), w)
        return torch.polar(torch.ones_like(f), f)

    def forward(self, positions, q):
        a = self.rd // 2
        parts = [a - 2 * (a // 3), a // 3, a // 3]
        tab = torch.cat([self.tab(self.rows, 2 * p) for p in parts], 1)
        t, h, w = tab.split(parts, 1)
        f_, h_, w_ = 1, 2, 3
        fc = torch.cat(
            [
                t[:f_].view(f_, 1, 1, -1).expand(f_, h_, w_, -1),
                h[:h_].view(1, h_, 1, -1).expand(f_, h_, w_, -1),
                w[:w_].view(1, 1, w_, -1).expand(f_, h_, w_, -1),
            ],
            -1,
        ).reshape(6, 1, -1)
        z = torch.view_as_complex(q[0].to(DT64).reshape(6, q.shape[2], -1, 2))
        return torch.view_as_real(z * fc).flatten(2).float()


@form("F91", "diffusers Wan: float64 outer, repeat_interleave, float32 tables, split/slice/expand/cat", q="1shd")
class F91(Form):
    def forward(self, positions, q):
        d = self.rd // 2
        cs, ss = [], []
        for _ in range(2):
            fr = 1.0 / (10000.0 ** (torch.arange(0, d, 2, dtype=DT64) / d)) / 1.0
            f = torch.outer(torch.arange(self.rows), fr)
            cs.append(f.cos().repeat_interleave(2, 1, output_size=d).float())
            ss.append(f.sin().repeat_interleave(2, 1, output_size=d).float())
        c, s = torch.cat(cs, 1), torch.cat(ss, 1)

        def grid(m):
            a, b = m.split([d, d], 1)
            return torch.cat(
                [a[:2].view(2, 1, -1).expand(2, 3, -1), b[:3].view(1, 3, -1).expand(2, 3, -1)], -1
            ).reshape(1, 6, 1, -1)

        c, s = grid(c), grid(s)
        x1, x2 = q.unflatten(-1, (-1, 2)).unbind(-1)
        cc, ss_ = c[..., 0::2], s[..., 1::2]
        out = torch.empty_like(q)
        out[..., 0::2] = x1 * cc - x2 * ss_
        out[..., 1::2] = x1 * ss_ + x2 * cc
        return out.type_as(q)


@form("F92", "CogVideo SAT: per-axis angles repeated and broadcast over T,H,W, cos/sin, 3-D block slice", q="hsd")
class F92(Form):
    def forward(self, positions, q):
        n = self.side
        d = self.rd // 2
        fs = []
        for _ in range(2):
            f = torch.einsum("..., f -> ... f", torch.arange(n, dtype=DT32), inv_cut(d))
            fs.append(f.repeat_interleave(2, -1))
        f = torch.cat(torch.broadcast_tensors(fs[0][:, None, :], fs[1][None, :, :]), -1).contiguous()
        s, c = f.sin(), f.cos()

        def block(m):
            return m[:2, :3].contiguous().reshape(6, -1).unsqueeze(0).unsqueeze(0).to(q.dtype)

        return q * block(c) + rot_pair(q) * block(s)


@form("F93", "CogVideoX diffusers: linspace grids (end depends on size), outer, repeat_interleave", q="grid")
class F93(Form):
    def forward(self, positions, q):
        n = self.side
        d = self.rd // 2
        g = torch.linspace(0, 8 * (n - 1) / n, n, dtype=DT32)
        f = torch.outer(g, 1.0 / (10000.0 ** (torch.arange(0, d, 2, dtype=DT32) / d)))
        c = f.cos().repeat_interleave(2, 1).float()
        s = f.sin().repeat_interleave(2, 1).float()

        def mix(m):
            return torch.cat([m[:, None, :].expand(-1, n, -1), m[None, :, :].expand(n, -1, -1)], -1).view(n * n, -1)

        return (q.float() * mix(c) + rot_pair(q).float() * mix(s)).to(q.dtype)


@form("F94", "Lumina Next-DiT: complex row table viewed/repeated to a square, cat, flatten, block slice", q="1shd")
class F94(Form):
    def forward(self, positions, q):
        n = self.side
        fr = 1.0 / (10000.0 ** (torch.arange(0, self.rd, 4)[: self.rd // 4].float() / self.rd))
        t = torch.arange(n, dtype=torch.float) / 1.5
        f = torch.outer(t, fr).float()
        z = torch.polar(torch.ones_like(f), f)
        a = z.view(n, 1, self.rd // 4, 1).repeat(1, n, 1, 1)
        b = z.view(1, n, self.rd // 4, 1).repeat(n, 1, 1, 1)
        tab = torch.cat([a, b], -1).flatten(2)
        fc = tab[:2, :3].flatten(0, 1).unsqueeze(0)
        return use_cplx(q, fc.unsqueeze(2))


@form(
    "F95",
    "Lumina2 / Z-Image: one complex table per axis (float64), gather with expanded index, cat",
    pos="bs2",
    q="bshd",
)
class F95(Form):
    def forward(self, positions, q):
        d = self.rd // 2
        out = []
        for i in range(2):
            fr = 1.0 / (256.0 ** (torch.arange(0, d, 2, dtype=DT64) / d))
            f = torch.outer(torch.arange(self.rows, dtype=DT64), fr).float()
            z = torch.polar(torch.ones_like(f), f).to(torch.complex64)
            ix = positions[:, :, i : i + 1].repeat(1, 1, z.shape[-1]).to(torch.int64)
            out.append(torch.gather(z.unsqueeze(0).repeat(ix.shape[0], 1, 1), 1, ix))
        return use_cplx(q, torch.cat(out, -1).unsqueeze(2))


@form("F97", "Kandinsky 5: angle table, index, divide, cos/sin, 2x2 stack")
class F97(Form):
    def forward(self, positions, q):
        h = self.rd // 2
        w = torch.exp(-math.log(10000.0) * torch.arange(start=0, end=h, dtype=DT32) / h)
        a = torch.outer(torch.arange(self.rows, dtype=w.dtype), w)[positions] / 2.0
        c, s = torch.cos(a), torch.sin(a)
        r = torch.stack([c, -s, s, c], -1)
        r = r.view(*r.shape[:-1], 2, 2).unsqueeze(-4)
        x = q.reshape(*q.shape[:-1], -1, 1, 2).to(DT32)
        return (r * x).sum(-1).reshape(q.shape).to(q.dtype)


@form("F98", "Cosmos: range of max rows sliced before the outer product, scale by fps, repeat, cat x2", q="1shd")
class F98(Form):
    def forward(self, positions, q):
        t = torch.arange(self.rows, dtype=DT32)
        d = self.rd // 2
        w = 1.0 / (10000.0 ** (torch.arange(0, d, 2, dtype=DT32)[: d // 2] / d))
        eh = torch.outer(t[:2] / 16 * 24, w)[:, None, :].repeat(1, 3, 1)
        ew = torch.outer(t[:3], w)[None, :, :].repeat(2, 1, 1)
        f = torch.cat([eh, ew] * 2, -1).flatten(0, 1).float()
        c, s = torch.cos(f), torch.sin(f)
        return use_full(q.float(), c[None, :, None], s[None, :, None]).to(q.dtype)


@form("F99", "CogView4: angle table indexed by range*rows//n (no data input), expand, cat, cos/sin", q="1shd")
class F99(Form):
    def forward(self, positions, q):
        d = self.rd // 2
        w = 1.0 / (10000.0 ** (torch.arange(0, d, 2, dtype=DT32)[: d // 2].float() / d))
        fh = torch.outer(torch.arange(self.rows), w)
        fw = torch.outer(torch.arange(self.rows), w)
        h, k = 2, 3
        fh = fh[torch.arange(h) * self.rows // h].unsqueeze(1).expand(h, k, -1)
        fw = fw[torch.arange(k) * self.rows // k].unsqueeze(0).expand(h, k, -1)
        f = torch.cat([fh, fw], -1)
        f = torch.cat([f, f], -1).reshape(h * k, -1)
        return use_full(q, f.cos()[None, :, None], f.sin()[None, :, None]).to(q.dtype)


@form("F100", "Mochi: learned frequencies, linspace centres, meshgrid, einsum nd,dhf, autocast fp32", q="grid2")
class F100(Form):
    def setup(self):
        self.w = nn.Parameter(torch.randn(3, 2, self.rd // 2, generator=torch.Generator().manual_seed(0)))

    def forward(self, positions, q):
        n = self.side
        e = torch.linspace(-n / 2, n / 2, n + 1)
        c_ = (e[:-1] + e[1:]) / 2
        t = torch.arange(1, dtype=DT32)
        g = torch.stack(torch.meshgrid(t, c_, c_, indexing="ij"), -1).view(-1, 3)
        with torch.autocast("cpu", torch.float32, enabled=False):
            f = torch.einsum("nd,dhf->nhf", g.to(DT32), self.w.to(DT32))
        c, s = torch.cos(f), torch.sin(f)
        x = q.float()
        ev, od = x[..., 0::2], x[..., 1::2]
        return torch.stack((ev * c - od * s, ev * s + od * c), -1).flatten(-2).to(q.dtype)


# ------------------------------------------------------------------ inputs
def make_inputs(cls, rows, rd, n=6, seed=0):
    g = torch.Generator().manual_seed(seed)
    top = min(rows, 100)
    side = int(math.isqrt(min(rows, 256)))

    def r(*s, hi=top):
        return torch.randint(0, hi, s, generator=g)

    pos = {
        "n": lambda: r(n),
        "ns": lambda: torch.arange(2, 2 + n),
        "nf": lambda: r(n).float(),
        "3n": lambda: r(3, n),
        "4n": lambda: r(4, n),
        "n3": lambda: r(n, 3),
        "3n32": lambda: r(3, n).int(),
        "bs": lambda: r(2, n),
        "b2s": lambda: r(2, 2, n),
        "bs2": lambda: r(2, n, 2),
        "hw": lambda: r(n, 2, hi=side),
    }[cls.pos]()
    side_q = int(math.isqrt(rows))
    shp = {
        "nhd": (n, 2, rd),
        "shd": (n, 2, rd),
        "hsd": (2, n, rd),
        "bshd": (2, n, 2, rd),
        "bhsd": (2, 2, n, rd),
        "1shd": (1, n, 2, rd),
        "bn1": (2, side_q * side_q + 1, 1, rd),
        "grid": (2, side_q * side_q, rd),
        "grid2": (side_q * side_q, 2, rd),
    }[cls.qlay]
    q = torch.randn(shp, generator=g).to(cls.qdtype)
    return pos, q
