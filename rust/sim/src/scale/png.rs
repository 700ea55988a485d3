// SPDX-License-Identifier: GPL-2.0

//! Plots: lines with markers into a PNG file. What this takes of PNG is a few dozen lines, so
//! that no library and nothing that it depends on has to be fetched.

#![forbid(unsafe_code)]

const W: usize = 960;
const H: usize = 600;
const LEFT: usize = 90;
const RIGHT: usize = 200;
const TOP: usize = 40;
const BOTTOM: usize = 60;

/// A line of a plot.
#[derive(Clone, Debug)]
pub(crate) struct Line {
    pub(crate) name: String,
    pub(crate) points: Vec<(f64, f64)>,
}

/// A plot.
#[derive(Clone, Debug)]
pub(crate) struct Plot {
    pub(crate) title: String,
    pub(crate) x: String,
    pub(crate) y: String,
    pub(crate) log_x: bool,
    pub(crate) log_y: bool,
    pub(crate) lines: Vec<Line>,
}

const COLORS: [[u8; 3]; 8] = [
    [0, 90, 200],
    [210, 40, 40],
    [230, 140, 0],
    [0, 150, 80],
    [110, 110, 110],
    [150, 60, 180],
    [0, 160, 180],
    [120, 80, 40],
];

struct Canvas(Vec<u8>);

impl Canvas {
    fn dot(&mut self, x: i64, y: i64, c: [u8; 3]) {
        if (0..W as i64).contains(&x) && (0..H as i64).contains(&y) {
            let i = 3 * (y as usize * W + x as usize);
            self.0[i..i + 3].copy_from_slice(&c);
        }
    }

    fn line(&mut self, a: (f64, f64), b: (f64, f64), c: [u8; 3], thick: bool) {
        let n = (b.0 - a.0).abs().max((b.1 - a.1).abs()).ceil().max(1.0);
        for i in 0..=n as i64 {
            let t = i as f64 / n;
            let (x, y) = (a.0 + (b.0 - a.0) * t, a.1 + (b.1 - a.1) * t);
            self.dot(x as i64, y as i64, c);
            if thick {
                self.dot(x as i64 + 1, y as i64, c);
                self.dot(x as i64, y as i64 + 1, c);
            }
        }
    }

    fn text(&mut self, x: usize, y: usize, text: &str, upright: bool) {
        for (n, ch) in text.chars().enumerate() {
            for col in 0..5 {
                for row in 0..7 {
                    if !super::font::dot(ch, row, col) {
                        continue;
                    }
                    let (dx, dy) = ((n * 6 + col) * 3 / 2, row * 3 / 2);
                    for (sx, sy) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
                        if upright {
                            self.dot((x + dy + sx) as i64, y as i64 - (dx + sy) as i64, [0; 3]);
                        } else {
                            self.dot((x + dx + sx) as i64, (y + dy + sy) as i64, [0; 3]);
                        }
                    }
                }
            }
        }
    }
}

fn short(v: f64) -> String {
    let a = v.abs();
    let (v, unit) = if a >= 1e9 {
        (v / 1e9, "G")
    } else if a >= 1e6 {
        (v / 1e6, "M")
    } else if a >= 1e4 {
        (v / 1e3, "k")
    } else {
        (v, "")
    };
    let t = if v.abs() >= 100.0 || v == v.trunc() {
        format!("{v:.0}")
    } else if v.abs() >= 1.0 {
        format!("{v:.1}")
    } else {
        format!("{v:.3}")
    };
    t + unit
}

/// Distances of ticks that read well.
fn step(span: f64) -> f64 {
    let raw = span / 6.0;
    let base = 10f64.powf(raw.log10().floor());
    let n = raw / base;
    base * if n <= 1.0 {
        1.0
    } else if n <= 2.0 {
        2.0
    } else if n <= 5.0 {
        5.0
    } else {
        10.0
    }
}

impl Plot {
    /// The plot as a PNG file.
    pub(crate) fn render(&self) -> Vec<u8> {
        let mut c = Canvas(vec![255; 3 * W * H]);
        let fx = |v: f64| if self.log_x { v.max(1e-12).log2() } else { v };
        let fy = |v: f64| if self.log_y { v.max(1e-12).log10() } else { v };
        let points = || self.lines.iter().flat_map(|l| l.points.iter());
        let (mut x0, mut x1) = (f64::MAX, f64::MIN);
        let (mut y0, mut y1) = (f64::MAX, f64::MIN);
        for p in points() {
            x0 = x0.min(fx(p.0));
            x1 = x1.max(fx(p.0));
            y0 = y0.min(fy(p.1));
            y1 = y1.max(fy(p.1));
        }
        if x0 > x1 {
            (x0, x1, y0, y1) = (0.0, 1.0, 0.0, 1.0);
        }
        if !self.log_y {
            y0 = y0.min(0.0);
            y1 += (y1 - y0) * 0.05;
        }
        if x1 - x0 < 1e-12 {
            x1 = x0 + 1.0;
        }
        if y1 - y0 < 1e-12 {
            y1 = y0 + 1.0;
        }
        let (w, h) = ((W - LEFT - RIGHT) as f64, (H - TOP - BOTTOM) as f64);
        let px = |v: f64| LEFT as f64 + (fx(v) - x0) / (x1 - x0) * w;
        let py = |v: f64| TOP as f64 + h - (fy(v) - y0) / (y1 - y0) * h;
        let grey = [215; 3];
        let ticks = |lo: f64, hi: f64, log: bool, base: f64| -> Vec<f64> {
            if log {
                let n = (hi - lo).max(1.0);
                let by = (n / 8.0).ceil();
                let mut t = lo.ceil();
                let mut out = Vec::new();
                while t <= hi + 1e-9 {
                    out.push(base.powf(t));
                    t += by;
                }
                out
            } else {
                let s = step(hi - lo);
                let mut t = (lo / s).ceil() * s;
                let mut out = Vec::new();
                while t <= hi + s * 1e-6 {
                    out.push(t);
                    t += s;
                }
                out
            }
        };
        for t in ticks(x0, x1, self.log_x, 2.0) {
            c.line((px(t), TOP as f64), (px(t), TOP as f64 + h), grey, false);
            let s = short(t);
            c.text(px(t) as usize - s.len() * 4, H - BOTTOM + 8, &s, false);
        }
        for t in ticks(y0, y1, self.log_y, 10.0) {
            c.line((LEFT as f64, py(t)), (LEFT as f64 + w, py(t)), grey, false);
            let s = short(t);
            let x = LEFT.saturating_sub(s.len() * 9 + 8);
            c.text(x, (py(t) - 5.0) as usize, &s, false);
        }
        let (l, r, t, b) = (LEFT as f64, LEFT as f64 + w, TOP as f64, TOP as f64 + h);
        for (p, q) in [((l, t), (l, b)), ((l, b), (r, b))] {
            c.line(p, q, [0; 3], false);
        }
        c.text(LEFT, 14, &self.title, false);
        c.text(
            LEFT + w as usize / 2 - self.x.len() * 4,
            H - 28,
            &self.x,
            false,
        );
        c.text(12, TOP + h as usize / 2 + self.y.len() * 4, &self.y, true);
        for (n, line) in self.lines.iter().enumerate() {
            let color = COLORS[n % COLORS.len()];
            for p in line.points.windows(2) {
                c.line(
                    (px(p[0].0), py(p[0].1)),
                    (px(p[1].0), py(p[1].1)),
                    color,
                    true,
                );
            }
            if line.points.len() < 60 {
                for p in &line.points {
                    for dx in -3i64..=3 {
                        for dy in -3i64..=3 {
                            c.dot(px(p.0) as i64 + dx, py(p.1) as i64 + dy, color);
                        }
                    }
                }
            }
            let y = TOP + 20 * n;
            let x = (LEFT + w as usize + 12) as f64;
            c.line((x, y as f64 + 5.0), (x + 20.0, y as f64 + 5.0), color, true);
            c.text(x as usize + 26, y, &line.name, false);
        }
        encode(&c.0)
    }
}

fn chunk(out: &mut Vec<u8>, kind: &[u8; 4], data: &[u8]) {
    out.extend_from_slice(&(data.len() as u32).to_be_bytes());
    let start = out.len();
    out.extend_from_slice(kind);
    out.extend_from_slice(data);
    let mut crc = u32::MAX;
    for b in &out[start..] {
        crc ^= u32::from(*b);
        for _ in 0..8 {
            crc = crc >> 1 ^ 0xedb8_8320 & (crc & 1).wrapping_neg();
        }
    }
    out.extend_from_slice(&(!crc).to_be_bytes());
}

/// Bits into bytes, lowest first.
struct Bits {
    out: Vec<u8>,
    bits: u32,
    n: u32,
}

impl Bits {
    fn put(&mut self, value: u32, n: u32) {
        self.bits |= value << self.n;
        self.n += n;
        while self.n >= 8 {
            self.out.push(self.bits as u8);
            self.bits >>= 8;
            self.n -= 8;
        }
    }

    /// A code, which goes highest bit first.
    fn code(&mut self, value: u32, n: u32) {
        self.put(value.reverse_bits() >> (32 - n), n);
    }

    /// A literal or length symbol in the fixed code.
    fn symbol(&mut self, s: u32) {
        match s {
            0..=143 => self.code(0x30 + s, 8),
            144..=255 => self.code(0x190 + s - 144, 9),
            256..=279 => self.code(s - 256, 7),
            _ => self.code(0xc0 + s - 280, 8),
        }
    }
}

/// Repetitions of three bytes become lengths; with so much white that is enough.
fn deflate(data: &[u8]) -> Vec<u8> {
    let mut b = Bits {
        out: vec![0x78, 0x01],
        bits: 0,
        n: 0,
    };
    b.put(1, 1);
    b.put(1, 2);
    let mut i = 0;
    while i < data.len() {
        let mut run = 0;
        if i >= 3 {
            while run < 258 && i + run < data.len() && data[i + run] == data[i + run - 3] {
                run += 1;
            }
        }
        if run >= 258 {
            // Length 258 at distance 3.
            b.symbol(285);
            b.code(2, 5);
            i += 258;
        } else if (3..=10).contains(&run) {
            b.symbol(254 + run as u32);
            b.code(2, 5);
            i += run;
        } else if run > 10 {
            b.symbol(264);
            b.code(2, 5);
            i += 10;
        } else {
            b.symbol(u32::from(data[i]));
            i += 1;
        }
    }
    b.symbol(256);
    b.put(0, 7);
    let (mut s1, mut s2) = (1u32, 0u32);
    for d in data {
        s1 = (s1 + u32::from(*d)) % 65521;
        s2 = (s2 + s1) % 65521;
    }
    b.out.extend_from_slice(&(s2 << 16 | s1).to_be_bytes());
    b.out
}

fn encode(rgb: &[u8]) -> Vec<u8> {
    let mut raw = Vec::with_capacity(rgb.len() + H);
    for row in rgb.chunks(3 * W) {
        raw.push(0);
        raw.extend_from_slice(row);
    }
    let mut out = b"\x89PNG\r\n\x1a\n".to_vec();
    let mut head = Vec::new();
    head.extend_from_slice(&(W as u32).to_be_bytes());
    head.extend_from_slice(&(H as u32).to_be_bytes());
    head.extend_from_slice(&[8, 2, 0, 0, 0]);
    chunk(&mut out, b"IHDR", &head);
    chunk(&mut out, b"IDAT", &deflate(&raw));
    chunk(&mut out, b"IEND", &[]);
    out
}
