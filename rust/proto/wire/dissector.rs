// SPDX-License-Identifier: GPL-2.0

//! The Wireshark dissector (`selftests/metaroce.lua`) against the code that the module runs:
//! packets of every kind, written by it, have to come out with the values that went in;
//! what it refuses has to be called malformed, and nothing else; and a capture taken from the
//! module (selftests/dissector.sh) has to be read alike by both. Skipped where there is no tshark.

#![forbid(unsafe_code)]

extern crate std;

use super::*;
use crate::proto::api::{Direction, Fault, Opcode, HEADER_MAX};
use crate::proto::stream::{BlockStatus, StreamBlock};
use std::borrow::ToOwned;
use std::collections::BTreeSet;
use std::format;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;
use std::string::{String, ToString};
use std::vec::Vec;

const CID: u64 = 0x8182_8384_8586_8788;

/// Where the packet begins in frames made here: behind 20 bytes of IPv4 and 8 of UDP.
const FRAME: usize = 28;

/// Fields by name, in the order of the packet: numbers in decimal, bytes in hexadecimal.
type Fields = Vec<(String, String)>;

fn crc32c(bytes: &[u8]) -> u32 {
    !bytes.iter().enumerate().fold(!0u32, |crc, (i, b)| {
        let b = if (4..8).contains(&i) { 0 } else { *b };
        (0..8).fold(crc ^ u32::from(b), |c, _| {
            (c >> 1) ^ if c & 1 != 0 { 0x82f6_3b78 } else { 0 }
        })
    })
}

/// Writes the CRC into a packet.
fn seal(mut b: Vec<u8>) -> Vec<u8> {
    let crc = crc32c(&b);
    if let Some(s) = b.get_mut(4..8) {
        s.copy_from_slice(&crc.to_be_bytes());
    }
    b
}

fn header(f: impl FnOnce(&mut Writer<'_>)) -> Vec<u8> {
    let mut buf = [0; HEADER_MAX];
    let mut w = Writer::new(&mut buf);
    f(&mut w);
    let len = usize::from(w.finish());
    assert_ne!(len, 0);
    buf[..len].to_vec()
}

fn data(p: &PathHeader, s: &StreamHeader, payload: usize) -> Vec<u8> {
    let mut b = header(|w| emit_data(w, CID, p, s));
    b.extend((0..payload).map(|i| i as u8));
    b
}

/// A capture of these datagrams, in the format of libpcap, each in an IPv4 packet.
fn capture(packets: &[Vec<u8>]) -> Vec<u8> {
    let mut f = Vec::new();
    for v in [0xa1b2_c3d4u32, 2 | 4 << 16, 0, 0, 0x4_0000, 101] {
        f.extend(v.to_le_bytes());
    }
    for (i, p) in packets.iter().enumerate() {
        let len = (p.len() + FRAME) as u32;
        for v in [i as u32, 0, len, len] {
            f.extend(v.to_le_bytes());
        }
        let mut ip = [0u8; FRAME];
        ip[0] = 0x45;
        ip[2..4].copy_from_slice(&(len as u16).to_be_bytes());
        ip[8] = 64;
        ip[9] = 17;
        ip[12..20].copy_from_slice(&[10, 0, 0, 1, 10, 0, 0, 2]);
        ip[20..22].copy_from_slice(&50_000u16.to_be_bytes());
        ip[22..24].copy_from_slice(&4795u16.to_be_bytes());
        ip[24..26].copy_from_slice(&(p.len() as u16 + 8).to_be_bytes());
        f.extend(ip);
        f.extend(p);
    }
    f
}

/// A packet as tshark shows it.
#[derive(Debug, Default)]
struct Shown {
    frame: usize,
    at: usize,
    len: usize,
    fields: Fields,
    /// Texts of types, opcodes and the like.
    names: Vec<(String, String)>,
    /// Bytes that a field shows, from the frame's begin.
    covered: BTreeSet<usize>,
    malformed: bool,
    wrong_crc: bool,
}

fn script() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../selftests/metaroce.lua")
}

fn tshark(arguments: &[&str]) -> Option<String> {
    let lua = format!("lua_script:{}", script().display());
    let mut command = Command::new("tshark");
    command.args(arguments).args(["-X", &lua]);
    // No settings of anybody's. And it runs no scripts for root.
    command.env("HOME", "/nonexistent");
    if fs::metadata("/proc/self").is_ok_and(|m| m.uid() == 0) {
        command.uid(65534).gid(65534);
    }
    let out = match command.output() {
        Ok(out) => out,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            std::eprintln!("skipped: there is no tshark");
            return None;
        }
        Err(e) => panic!("tshark: {e}"),
    };
    let errors = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "tshark: {errors}");
    assert!(!errors.contains("Lua"), "tshark: {errors}");
    Some(String::from_utf8_lossy(&out.stdout).into_owned())
}

fn attribute<'a>(line: &'a str, name: &str) -> Option<&'a str> {
    let from = line.find(&format!(" {name}=\""))? + name.len() + 3;
    let rest = &line[from..];
    rest.get(..rest.find('"')?)
}

/// What tshark shows of a capture.
fn dissect(file: &std::path::Path) -> Option<Vec<Shown>> {
    let file = file.to_str().expect("a name in UTF-8");
    let text = tshark(&["-r", file, "-T", "pdml"])?;
    assert!(!text.contains("Lua Error"), "an error in the script");
    let mut all: Vec<Shown> = Vec::new();
    let (mut frame, mut ours) = (0, false);
    for line in text.lines().map(str::trim_start) {
        if line.starts_with("<packet>") {
            frame += 1;
        }
        let number = |name| attribute(line, name).and_then(|t| t.parse::<usize>().ok());
        // A hidden one, "malformed", stands inside of ours for each such remark.
        if line.starts_with("<proto ") && !line.contains(" hide=\"yes\"") {
            let name = attribute(line, "name").unwrap_or_default();
            assert_ne!(name, "_ws.malformed", "frame {frame}: tshark gave up");
            ours = name == "metaroce";
            if ours {
                all.push(Shown {
                    frame,
                    at: number("pos").unwrap_or(0),
                    len: number("size").unwrap_or(0),
                    ..Shown::default()
                });
            }
        }
        let Some(this) = all.last_mut().filter(|_| ours) else {
            continue;
        };
        let Some(name) = attribute(line, "name").filter(|_| line.starts_with("<field ")) else {
            continue;
        };
        let Some(name) = name.strip_prefix("metaroce.") else {
            continue;
        };
        let show = attribute(line, "show").unwrap_or_default();
        match name {
            "malformed" => this.malformed = true,
            "crc.bad" => this.wrong_crc = true,
            "resent" | "refused" | "failed" | "cut" => {}
            _ => {
                let at = number("pos").unwrap_or(0);
                this.covered.extend(at..at + number("size").unwrap_or(0));
                let value = match (show, attribute(line, "value")) {
                    ("True", _) => "1".to_owned(),
                    ("False", _) => "0".to_owned(),
                    _ if show.starts_with("0x") => {
                        u64::from_str_radix(&show[2..], 16).map_or(String::new(), |v| v.to_string())
                    }
                    _ if name == "ack.path.missing" || show.parse::<u64>().is_ok() => {
                        show.to_owned()
                    }
                    (_, value) => value.unwrap_or_default().to_owned(),
                };
                this.fields.push((name.to_owned(), value));
                let text = attribute(line, "showname").unwrap_or_default();
                this.names.push((name.to_owned(), text.to_owned()));
            }
        }
    }
    Some(all)
}

/// Collects fields.
#[derive(Default)]
struct Expected(Fields);

impl Expected {
    fn n(&mut self, name: &str, v: impl Into<u64>) -> &mut Self {
        self.0.push((name.to_owned(), v.into().to_string()));
        self
    }

    /// A field that means nothing: the parser does not look at it.
    fn any(&mut self, name: &str) -> &mut Self {
        self.0.push((name.to_owned(), "*".to_owned()));
        self
    }

    fn b(&mut self, name: &str, v: &[u8]) -> &mut Self {
        let hex = v.iter().fold(String::new(), |t, x| t + &format!("{x:02x}"));
        self.0.push((name.to_owned(), hex));
        self
    }

    fn base(&mut self, kind: Type, flags: u8, b: &[u8], p: &Packet<'_>) {
        self.n("version", VERSION)
            .n("type", kind as u8)
            .n("flags", flags);
        if kind == Type::Data {
            self.n("flags.ack_request", flags & 1)
                .n("flags.last", flags >> 1 & 1)
                .n("flags.solicited", flags >> 2 & 1)
                .n("flags.after", flags >> 3 & 1);
        }
        self.n("header_length", p.header_len() as u64)
            .n("crc", p.crc())
            .n("connection", p.connection_id().unwrap_or(0));
        assert_eq!(crc_of(b), Some(p.crc()));
    }

    fn data(&mut self, p: &PathHeader, s: &StreamHeader, payload: &[u8]) {
        use Opcode as O;
        self.n("path", p.path)
            .n("opcode", s.opcode as u8)
            .n("epoch", p.epoch)
            .n("sequence", p.sequence)
            .n("timestamp", p.timestamp);
        if s.opcode == O::Void {
            return;
        }
        self.n("round", s.round)
            .n("dst_qp", s.dst_qpn)
            .n("zero", 0u8)
            .n("src_qp", s.src_qpn)
            .n("stream_sequence", s.sseq)
            .n("message", s.msn);
        match s.opcode {
            O::ReadRequest | O::CompareSwap | O::FetchAdd | O::ReadResponse | O::AtomicResponse => {
                self.n("request", s.request)
            }
            _ => self.n("receive_message", s.rmsn),
        };
        self.n("offset", s.offset).n("total", s.total);
        if let O::Write | O::WriteImm | O::ReadRequest | O::CompareSwap | O::FetchAdd = s.opcode {
            self.n("address", s.va).n("key", s.rkey);
        }
        match s.opcode {
            O::WriteImm | O::SendImm if s.last => {
                self.n("immediate", s.imm);
            }
            O::SendInv if s.last => {
                self.n("invalidate", s.imm);
            }
            _ => {}
        }
        if let Some(after) = s.after {
            self.n("after", after);
        }
        if let O::ReadRequest | O::CompareSwap | O::FetchAdd = s.opcode {
            self.n("oldest", s.oldest);
        }
        match s.opcode {
            O::CompareSwap => {
                self.n("compare", s.compare_add).n("swap", s.swap);
            }
            O::FetchAdd => {
                self.n("add", s.compare_add);
            }
            O::AtomicResponse => {
                self.n("original", s.compare_add);
            }
            _ => {}
        }
        if !payload.is_empty() {
            self.b("payload", payload);
        }
    }

    fn ack(&mut self, h: &AckHeader, paths: &[PathBlock], streams: &[StreamBlock], words: &[u8]) {
        self.n("ack.number", h.number)
            .n("ack.share", h.share)
            .n("ack.path_blocks", paths.len() as u64)
            .n("ack.stream_blocks", streams.len() as u64)
            .n("ack.plane", h.plane)
            .n("ack.lateness", h.lateness);
        for (b, words) in paths.iter().zip(words) {
            self.n("ack.path", b.path)
                .n("ack.path.words", *words)
                .n("ack.path.epoch", b.epoch)
                .n("ack.path.cumulative", b.cumulative)
                .n("ack.path.echo", b.echo)
                .n("ack.path.delay", b.delay)
                .n("ack.path.received", b.received)
                .n("ack.path.ce", b.ce)
                .n("ack.path.duplicates", b.duplicates);
            for w in b.bits.iter().take(usize::from(*words)) {
                self.n("ack.path.bits", *w);
            }
            if *words != 0 {
                self.0.push(("ack.path.missing".to_owned(), missing(b)));
            }
        }
        for b in streams {
            self.n("ack.stream.limit_known", b.receive_limit.is_some())
                .n("ack.stream.response", b.dir == Direction::Response)
                .n("ack.stream.dst_qp", b.dst_qpn);
            let status = match b.status {
                BlockStatus::Ok => 0u8,
                BlockStatus::Rnr { .. } => 1,
                BlockStatus::NotReady { .. } => 2,
                BlockStatus::NoRoom { .. } => 3,
                BlockStatus::Fatal { .. } => 4,
            };
            self.n("ack.stream.status", status)
                .n("ack.stream.src_qp", b.src_qpn)
                .n("ack.stream.cumulative", b.cumulative)
                .n("ack.stream.messages", b.msn_done);
            match b.receive_limit {
                Some(limit) => self.n("ack.stream.limit", limit),
                None => self.any("ack.stream.limit"),
            };
            match b.status {
                BlockStatus::Ok => {}
                BlockStatus::Rnr {
                    rmsn,
                    timer_us,
                    round,
                } => {
                    self.n("ack.stream.receive_message", rmsn)
                        .n("ack.stream.round", round)
                        .n("ack.stream.timer", timer_us);
                }
                BlockStatus::NotReady { round } | BlockStatus::NoRoom { round } => {
                    self.any("ack.stream.zero")
                        .n("ack.stream.round", round)
                        .any("ack.stream.zero24");
                }
                BlockStatus::Fatal { msn, fault } => {
                    self.n("ack.stream.message", msn)
                        .n("ack.stream.fault", fault as u8);
                }
            }
        }
    }

    fn probe(&mut self, p: &Probe) {
        self.n("path", p.path)
            .n("probe.deaf", p.deaf)
            .n("epoch", p.epoch)
            .n("probe.next", p.next)
            .n("timestamp", p.timestamp)
            .n("probe.challenge", p.challenge)
            .n("probe.padding", p.padding);
    }

    fn key(&mut self, k: &HandshakeKey) {
        self.b("source", &k.source)
            .b("destination", &k.destination)
            .n("dscp", k.dscp);
    }

    fn handshake(&mut self, h: &Handshake, reserved: &[u8]) {
        self.key(&h.key);
        self.n("lowest", h.lowest)
            .n("highest", h.highest)
            .n("paths", h.paths)
            .n("features", h.features)
            .n("features.crc", h.features & 1)
            .n("features.zero_checksum6", h.features >> 1 & 1)
            .n("payload_mtu", h.payload_mtu)
            .n("sender_connection", h.connection_id)
            .n("peer_connection", h.peer_connection_id)
            .n("nonce", h.nonce)
            .n("instance", h.instance)
            .n("cookie", h.cookie)
            .n("cookie_time", h.cookie_time)
            .n("timestamp", h.timestamp)
            .n("epoch", h.epoch)
            .b("reserved", reserved);
    }
}

/// The numbers below the highest that have not arrived, as runs.
fn missing(b: &PathBlock) -> String {
    let has = |n: u64| n != 0 && b.bits[(n as usize - 1) / 64] >> ((n - 1) % 64) & 1 != 0;
    let highest = (1..=256).rev().find(|n| has(*n)).unwrap_or(0);
    let mut runs: Vec<(u64, u64)> = Vec::new();
    for n in (0..highest).filter(|n| !has(*n)) {
        match runs.last_mut() {
            Some((_, to)) if *to + 1 == n => *to = n,
            _ => runs.push((n, n)),
        }
    }
    let name = |n: u64| b.cumulative.wrapping_add(n as u32).to_string();
    let text = |(a, b): &(u64, u64)| {
        if a == b {
            name(*a)
        } else {
            name(*a) + "-" + &name(*b)
        }
    };
    runs.iter().map(text).collect::<Vec<_>>().join(" ")
}

/// Number of words of each path block: written ones may be zero.
fn words(body: &[u8], paths: usize) -> Vec<u8> {
    let mut at = 12;
    (0..paths)
        .map(|_| {
            let n = body[at + 1];
            at += 20 + usize::from(n) * 8;
            n
        })
        .collect()
}

/// What has to be shown of a packet that the parser takes; `None` of others.
fn expected(b: &[u8]) -> Option<Fields> {
    let p = Packet::parse(b).ok()?;
    let (head, payload) = b.split_at(p.header_len());
    p.check_payload(payload.len() as u32).ok()?;
    let mut e = Expected::default();
    let kind = Type::from_bits(b[0] & 0xf).expect("it was parsed");
    e.base(kind, b[1], b, &p);
    match p.body() {
        Body::Data(path, s) => {
            assert_eq!(path.ack_request, b[1] & FLAG_ACK_REQUEST != 0);
            assert_eq!(s.last, b[1] & FLAG_LAST != 0);
            e.data(path, s, payload);
        }
        Body::Ack(a) => {
            let paths: Vec<_> = a.blocks.paths().collect();
            let streams: Vec<_> = a.blocks.streams().collect();
            let words = words(&head[16..], paths.len());
            e.ack(&a.header, &paths, &streams, &words);
        }
        Body::Probe(p) => {
            e.probe(p);
            if !payload.is_empty() {
                e.b("probe.pad", payload);
            }
        }
        Body::ProbeReply(r) => {
            e.probe(&r.probe);
            let paths: Vec<_> = r.ack.blocks.paths().collect();
            let streams: Vec<_> = r.ack.blocks.streams().collect();
            let words = words(&head[40..], paths.len());
            e.ack(&r.ack.header, &paths, &streams, &words);
        }
        Body::Query(q) => {
            let all: Vec<_> = q.iter().collect();
            e.n("query.count", all.len() as u64)
                .b("query.reserved", &[0; 3]);
            for q in all {
                e.n("query.direction", q.dir == Direction::Response)
                    .n("query.dst_qp", q.dst_qpn)
                    .n("query.round", q.round)
                    .n("query.src_qp", q.src_qpn)
                    .n("query.stream_sequence", q.sseq);
            }
        }
        Body::Close(c) => {
            let kind = match c.kind {
                CloseKind::Request => 0u8,
                CloseKind::Agree => 1,
                CloseKind::Refuse => 2,
            };
            e.n("close.kind", kind).n("close.number", c.number);
        }
        Body::Planes(p) => {
            let all: Vec<_> = p.iter().collect();
            e.n("planes.number", p.number)
                .n("planes.known", p.known)
                .n("epoch", p.epoch)
                .n("planes.count", all.len() as u64)
                .n("planes.zero", 0u8);
            for plane in all {
                e.n("planes.id", plane.id)
                    .n("planes.flags", plane.draining)
                    .n("planes.zero16", 0u8)
                    .b("planes.gid", &plane.gid);
            }
        }
        Body::Init(h) | Body::Cookie(h) | Body::Accept(h) => e.handshake(h, &head[110..]),
        Body::Refuse(r) => {
            e.key(&r.key);
            let reason = match r.reason {
                RefuseReason::NotYet => 0u8,
                RefuseReason::Version => 1,
            };
            e.n("reason", reason)
                .n("lowest", r.lowest)
                .n("highest", r.highest)
                .n("nonce", r.nonce);
        }
        Body::Unknown(u) => {
            e.key(&u.key);
            e.b("reserved", &head[49..52]).n("unknown", u.connection_id);
        }
    }
    let status = match (p.crc() == crc32c(b), p.crc() == 0 && b[0] & 0xf < 8) {
        (true, _) => 1u8,
        (_, true) => 2,
        _ => 0,
    };
    e.n("crc.status", status);
    Some(e.0)
}

/// Compares what is shown of `b`, which begins at `shown.at` of its frame.
#[track_caller]
fn compare(shown: &Shown, b: &[u8]) {
    let frame = shown.frame;
    assert_eq!(shown.len, b.len(), "frame {frame}");
    let Some(expected) = expected(b) else {
        assert!(shown.malformed, "frame {frame} is refused: {b:02x?}");
        return;
    };
    assert!(!shown.malformed, "frame {frame} is fine: {b:02x?}");
    for (i, e) in expected.iter().enumerate() {
        let same = match shown.fields.get(i) {
            Some((name, _)) if e.1 == "*" => *name == e.0,
            shown => shown == Some(e),
        };
        assert!(same, "frame {frame}: {:?}, not {e:?}", shown.fields.get(i));
    }
    assert_eq!(shown.fields.len(), expected.len(), "frame {frame}");
    let status = expected.last().map(|(_, v)| v.as_str());
    assert_eq!(shown.wrong_crc, status == Some("0"), "frame {frame}");
    for i in shown.at..shown.at + b.len() {
        assert!(shown.covered.contains(&i), "frame {frame}: byte {i}");
    }
}

/// Writes a capture, and compares what is shown of it.
fn check(name: &str, packets: &[Vec<u8>]) -> Option<Vec<Shown>> {
    let file = std::env::temp_dir().join(format!("metaroce-{name}-{}.pcap", std::process::id()));
    fs::write(&file, capture(packets)).expect("room for a file");
    let shown = dissect(&file);
    let _ = fs::remove_file(&file);
    let shown = shown?;
    assert_eq!(shown.len(), packets.len(), "one tree for each packet");
    for (s, b) in shown.iter().zip(packets) {
        assert_eq!(s.at, FRAME);
        compare(s, b);
    }
    Some(shown)
}

fn path() -> PathHeader {
    PathHeader {
        path: 0x2b,
        epoch: 0x1234,
        sequence: 0x5566_7788,
        timestamp: 0x99aa_bbcc,
        ack_request: true,
    }
}

const OPCODES: [Opcode; 11] = [
    Opcode::Void,
    Opcode::Write,
    Opcode::WriteImm,
    Opcode::Send,
    Opcode::SendImm,
    Opcode::SendInv,
    Opcode::ReadRequest,
    Opcode::CompareSwap,
    Opcode::FetchAdd,
    Opcode::ReadResponse,
    Opcode::AtomicResponse,
];

/// A header with a value of its own in each field, and the payload that goes with it.
fn message(opcode: Opcode, last: bool) -> (StreamHeader, usize) {
    use Opcode as O;
    if opcode == O::Void {
        return (StreamHeader::default(), 0);
    }
    let single = matches!(
        opcode,
        O::ReadRequest | O::CompareSwap | O::FetchAdd | O::AtomicResponse
    );
    let s = StreamHeader {
        opcode,
        last,
        solicited: last,
        dst_qpn: 0x11_2233,
        src_qpn: 0x44_5566,
        sseq: 0xa0a1_a2a3,
        msn: 0xb0b1_b2b3,
        rmsn: 0xc0c1_c2c3,
        request: 0xc4c5_c6c7,
        offset: if single { 0 } else { 0x1000 },
        total: if single { 8 } else { 0x1000 + 333 },
        round: 0x77,
        va: 0xd0d1_d2d3_d4d5_d6d7,
        rkey: 0xe0e1_e2e3,
        imm: 0xf0f1_f2f3,
        after: (last && matches!(opcode, O::Write | O::WriteImm)).then_some(0x0a0b_0c0d),
        oldest: 0x1a1b_1c1d,
        compare_add: 0x2021_2223_2425_2627,
        swap: 0x3031_3233_3435_3637,
    };
    let payload = match (single, last) {
        (true, _) => 0,
        (false, true) => 333,
        (false, false) => 332,
    };
    (s, payload)
}

/// Packets of every kind.
fn zoo() -> Vec<Vec<u8>> {
    let mut all = Vec::new();
    for opcode in OPCODES {
        for last in [true, false] {
            let (s, payload) = message(opcode, last);
            all.push(data(&path(), &s, payload));
        }
    }
    let block = PathBlock {
        path: 3,
        epoch: 0x0102,
        cumulative: 0xffff_fffe,
        bits: [0x8000_0000_0000_0001, 2, 0, 0xf00f],
        echo: 0x5060_7080,
        delay: 0x0a0b,
        received: 0x0c0d,
        ce: 0x0e0f,
        duplicates: 0x1011,
    };
    let none = PathBlock {
        path: 4,
        bits: [0; 4],
        ..block
    };
    let stream = |dir, receive_limit, status| StreamBlock {
        dst_qpn: 0x01_0203,
        src_qpn: 0x04_0506,
        dir,
        cumulative: 0x0708_090a,
        msn_done: 0x0b0c_0d0e,
        receive_limit,
        status,
    };
    use BlockStatus as B;
    let rnr = B::Rnr {
        rmsn: 0x1314_1516,
        timer_us: 0x17_1819,
        round: 0x1a,
    };
    let fatal = |fault| B::Fatal { msn: 9, fault };
    let streams = [
        stream(Direction::Request, Some(0x0f10_1112), rnr),
        stream(Direction::Response, None, B::Ok),
        stream(Direction::Request, Some(1), B::NotReady { round: 0x1b }),
        stream(Direction::Response, None, B::NoRoom { round: 0x1c }),
        stream(Direction::Request, None, fatal(Fault::InvalidRequest)),
        stream(Direction::Request, None, fatal(Fault::Access)),
        stream(Direction::Request, None, fatal(Fault::Operation)),
    ];
    let h = AckHeader {
        number: 0x2122_2324,
        share: 0x2526_2728,
        plane: 0x30,
        lateness: 0x29,
    };
    let fill = |mut a: AckWriter<'_, '_>, n: usize| {
        assert!(a.path(&block));
        assert!(a.path(&none));
        for s in streams.iter().take(n) {
            assert!(a.stream(s));
        }
    };
    all.push(header(|w| fill(AckWriter::new(w, CID, &h), 7)));
    all.push(header(|w| {
        let _ = AckWriter::new(w, CID, &h);
    }));
    let probe = Probe {
        path: 5,
        deaf: 0x17,
        epoch: 0x1819,
        next: 0x1a1b_1c1d,
        timestamp: 0x1e1f_2021,
        challenge: 0x0910_1112_1314_1516,
        padding: 500,
    };
    let mut padded = header(|w| probe.emit(w, CID));
    padded.resize(padded.len() + 500, 0);
    all.push(padded);
    all.push(header(|w| {
        Probe {
            padding: 0,
            ..probe
        }
        .emit(w, CID);
    }));
    all.push(header(|w| {
        fill(ProbeReply::begin(w, CID, &probe, &h), 2);
    }));
    all.push(header(|w| {
        let mut q = QueryWriter::new(w, CID);
        for dir in [Direction::Request, Direction::Response] {
            q.push(&Query {
                dst_qpn: 0x12_3456,
                src_qpn: 0x65_4321,
                dir,
                sseq: 0x0102_0304,
                round: 9,
            });
        }
    }));
    for kind in [CloseKind::Request, CloseKind::Agree, CloseKind::Refuse] {
        let number = 0x0304_0506;
        all.push(header(|w| Close { kind, number }.emit(w, CID)));
    }
    let mut ipv4 = [0; 16];
    ipv4[10..13].copy_from_slice(&[0xff, 0xff, 10]);
    let planes = [(1, false, ipv4), (2, true, [0xfd; 16])]
        .map(|(id, draining, gid)| PlaneAddress { id, draining, gid });
    let numbers = (0x0708_090a, 0x0b0c_0d0e, 0x0f10);
    all.push(header(|w| Planes::emit(w, CID, numbers, &planes)));
    all.push(header(|w| Planes::emit(w, CID, (0, 1, 2), &[])));
    let mut gid = [0xa1; 16];
    gid[15] = 0xfe;
    let key = HandshakeKey {
        source: gid,
        destination: [0xb2; 16],
        dscp: 26,
    };
    for (i, kind) in [Type::Init, Type::Cookie, Type::Accept]
        .into_iter()
        .enumerate()
    {
        let h = Handshake {
            key,
            lowest: 0,
            highest: 3,
            paths: 16,
            features: i as u32,
            payload_mtu: 0x0102_0304,
            connection_id: CID,
            peer_connection_id: 0x2222_0000_1111_3333,
            nonce: 0x3333_0000_1111_3333,
            instance: 0x4444_0000_1111_3333,
            cookie: 0x5555_0000_1111_3333,
            cookie_time: 0x6666_6666,
            timestamp: 0x7777_7777,
            epoch: 0x0809,
        };
        all.push(header(|w| h.emit(w, kind)));
    }
    for reason in [RefuseReason::NotYet, RefuseReason::Version] {
        let r = Refusal {
            key,
            reason,
            lowest: 1,
            highest: 2,
            nonce: 0x0304_0506_0708_090a,
        };
        all.push(header(|w| r.emit(w)));
    }
    let u = Unknown {
        key,
        connection_id: CID,
    };
    all.push(header(|w| u.emit(w)));
    all
}

#[test]
fn dissector_shows_every_field() {
    let mut packets: Vec<_> = zoo().into_iter().map(seal).collect();
    let sealed = packets.len();
    // Without a CRC, and with a wrong one.
    let (s, payload) = message(Opcode::Write, true);
    packets.push(data(&path(), &s, payload));
    let mut wrong = seal(data(&path(), &s, payload));
    wrong[200] ^= 1;
    packets.push(wrong);
    let Some(shown) = check("zoo", &packets) else {
        return;
    };
    assert!(shown.iter().take(sealed).all(|s| !s.wrong_crc));
    // The dissector's names are the core's.
    let text = |s: &Shown, field: &str| {
        let name = |(n, _): &&(String, String)| n == field;
        s.names
            .iter()
            .find(name)
            .map(|(_, t)| t.to_lowercase())
            .unwrap_or_default()
    };
    for (s, b) in shown.iter().zip(&packets) {
        let kind = Type::from_bits(b[0] & 0xf).expect("a type");
        let name = format!(" {kind:?} (").to_lowercase();
        assert!(text(s, "type").contains(&name), "{name}");
        if kind == Type::Data {
            let opcode = OPCODES[usize::from(b[17])];
            let name = format!(" {opcode:?} (").to_lowercase();
            assert!(text(s, "opcode").contains(&name), "{name}");
        }
    }
    // No field of the dissector went unseen.
    let all = tshark(&["-G", "fields"]).expect("it is there");
    let seen: BTreeSet<_> = shown
        .iter()
        .flat_map(|s| &s.fields)
        .map(|f| f.0.as_str())
        .collect();
    let mut known = 0;
    for line in all.lines().filter(|l| l.starts_with("F\t")) {
        let field = line.split('\t').nth(2).unwrap_or_default();
        let Some(field) = field.strip_prefix("metaroce.") else {
            continue;
        };
        let expert = ["malformed", "crc.bad", "cut", "resent", "refused", "failed"];
        if !expert.contains(&field) {
            known += 1;
            assert!(seen.contains(field), "{field} was never shown");
        }
    }
    assert_eq!(known, seen.len());
}

/// Several packets in one datagram, as a sending host captures them.
#[test]
fn dissector_takes_trains_apart() {
    let whole = |n: u32, len: usize, last| {
        let (mut s, _) = message(Opcode::Write, last);
        (s.offset, s.total) = (n * 1000, 10_000);
        let p = PathHeader {
            sequence: n,
            ..path()
        };
        seal(data(&p, &s, len))
    };
    let packets: Vec<_> = (0..9)
        .map(|n| whole(n, 1000, false))
        .chain([whole(9, 1000, true)])
        .collect();
    let file = std::env::temp_dir().join(format!("metaroce-train-{}.pcap", std::process::id()));
    fs::write(&file, capture(&[packets.concat()])).expect("room for a file");
    let shown = dissect(&file);
    let _ = fs::remove_file(&file);
    let Some(shown) = shown else { return };
    assert_eq!(shown.len(), packets.len());
    for (s, b) in shown.iter().zip(&packets) {
        compare(s, b);
    }
}

/// Changed packets: what the parser takes is shown as it reads it, what it refuses is malformed.
#[test]
fn dissector_refuses_what_the_parser_refuses() {
    let mut x = 0x6a09_e667_f3bc_c909u64;
    std::println!("seed {x}");
    let mut next = move || {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        x
    };
    let zoo = zoo();
    let mut packets = Vec::new();
    while packets.len() < 1500 {
        let mut b = zoo[next() as usize % zoo.len()].clone();
        for _ in 0..next() % 3 {
            // Mostly where the header is, mostly by little.
            let at = next() as usize % b.len().min(if next() % 4 == 0 { 512 } else { 60 });
            b[at] = match next() % 3 {
                0 => next() as u8,
                1 => b[at] ^ 1 << (next() % 8),
                _ => b[at].wrapping_add(1),
            };
        }
        match next() % 6 {
            0 => b.truncate(1 + next() as usize % b.len()),
            1 => b.extend((0..1 + next() % 9).map(|i| i as u8)),
            2 if b.len() > 3 => b[3] = b[3].wrapping_add((next() % 9) as u8).wrapping_sub(4),
            _ => {}
        }
        packets.push(seal(b));
    }
    let refused = packets.iter().filter(|b| expected(b).is_none()).count();
    std::println!("{refused} of {} are refused", packets.len());
    assert!((300..1200).contains(&refused));
    check("changed", &packets);
}

/// Frames of a capture in the format of libpcap.
fn frames(file: &[u8]) -> Vec<&[u8]> {
    let word = |at: usize| {
        let b = file.get(at..at + 4).and_then(|b| b.first_chunk());
        u32::from_le_bytes(*b.expect("a whole capture"))
    };
    assert!(matches!(word(0), 0xa1b2_c3d4 | 0xa1b2_3c4d), "no capture");
    let (mut at, mut all) = (24, Vec::new());
    while at < file.len() {
        let len = word(at + 8) as usize;
        assert_eq!(word(at + 8), word(at + 12), "captured in part");
        all.push(&file[at + 16..at + 16 + len]);
        at += 16 + len;
    }
    all
}

/// A capture taken from the module, of all opcodes and every kind of packet of two hosts with
/// one plane, but for Unknown, which is rare: `CAPTURE` names another one. It holds
/// nothing but packets of ours.
#[test]
fn dissector_reads_a_capture_as_the_module_does() {
    let file = std::env::var_os("CAPTURE")
        .map_or_else(|| script().with_file_name("metaroce.pcap"), PathBuf::from);
    let bytes = fs::read(&file).expect("a capture");
    let frames = frames(&bytes);
    let Some(shown) = dissect(&file) else { return };
    let (mut kinds, mut opcodes) = (BTreeSet::new(), BTreeSet::new());
    let mut last = 0;
    for s in &shown {
        assert!(s.frame - last <= 1, "frame {} is not ours", last + 1);
        last = s.frame;
        let b = &frames[s.frame - 1][s.at..s.at + s.len];
        compare(s, b);
        assert!(!s.malformed && !s.wrong_crc, "frame {}", s.frame);
        kinds.insert(b[0]);
        if b[0] == 0 {
            opcodes.insert(b[17]);
        }
    }
    assert_eq!(last, frames.len(), "every frame is shown");
    std::println!("{} packets in {last} frames", shown.len());
    assert_eq!(kinds, BTreeSet::from([0, 1, 2, 3, 4, 5, 8, 9, 10, 11]));
    assert_eq!(opcodes, (0..11).collect());
}
