// SPDX-License-Identifier: GPL-2.0
//! Packets of the wire format, made by hand: true ones, and those that no sender may send.

#![forbid(unsafe_code)]

/// The service port.
pub const PORT: u16 = 4795;

/// Kinds of packets.
pub mod kind {
    pub const DATA: u8 = 0;
    pub const ACK: u8 = 1;
    pub const PROBE: u8 = 2;
    pub const REPLY: u8 = 3;
    pub const QUERY: u8 = 4;
    pub const CLOSE: u8 = 5;
    pub const PLANES: u8 = 6;
    pub const INIT: u8 = 8;
    pub const COOKIE: u8 = 9;
    pub const ACCEPT: u8 = 10;
    pub const REFUSE: u8 = 11;
    pub const UNKNOWN: u8 = 12;
}

/// A packet that is being written: everything big-endian.
#[derive(Clone, Default)]
pub struct Packet(pub Vec<u8>);

impl Packet {
    /// The base header, with length and CRC still 0.
    pub fn new(kind: u8, flags: u8, id: u64) -> Self {
        Packet::default().u8(kind).u8(flags).u16(0).u32(0).u64(id)
    }

    pub fn u8(mut self, v: u8) -> Self {
        self.0.push(v);
        self
    }

    pub fn u16(mut self, v: u16) -> Self {
        self.0.extend_from_slice(&v.to_be_bytes());
        self
    }

    pub fn u32(mut self, v: u32) -> Self {
        self.0.extend_from_slice(&v.to_be_bytes());
        self
    }

    pub fn u64(mut self, v: u64) -> Self {
        self.0.extend_from_slice(&v.to_be_bytes());
        self
    }

    pub fn bytes(mut self, v: &[u8]) -> Self {
        self.0.extend_from_slice(v);
        self
    }

    /// The header ends here.
    pub fn header(mut self) -> Self {
        let len = self.0.len() as u16;
        self.0[2..4].copy_from_slice(&len.to_be_bytes());
        self
    }

    /// Overwrites bytes.
    pub fn put(mut self, at: usize, with: &[u8]) -> Self {
        self.0[at..at + with.len()].copy_from_slice(with);
        self
    }

    /// With its CRC.
    pub fn sealed(mut self) -> Vec<u8> {
        seal(&mut self.0);
        self.0
    }
}

/// Puts the right CRC into a packet that is long enough for one.
pub fn seal(packet: &mut [u8]) {
    if packet.len() >= 8 {
        packet[4..8].fill(0);
        let crc = crc32c(packet);
        packet[4..8].copy_from_slice(&crc.to_be_bytes());
    }
}

fn crc32c(bytes: &[u8]) -> u32 {
    static TABLE: std::sync::OnceLock<[u32; 256]> = std::sync::OnceLock::new();
    let table = TABLE.get_or_init(|| {
        std::array::from_fn(|i| (0..8).fold(i as u32, |c, _| c >> 1 ^ (c & 1).wrapping_neg() & 0x82f6_3b78))
    });
    !bytes.iter().fold(!0, |crc: u32, b| crc >> 8 ^ table[usize::from(crc as u8 ^ b)])
}

/// What a data packet says beside its opcode.
#[derive(Clone, Copy, Default)]
pub struct Data {
    pub path: u8,
    pub epoch: u16,
    pub sequence: u32,
    pub time: u32,
    pub dst: u32,
    pub src: u32,
    pub sseq: u32,
    pub msn: u32,
    pub number: u32,
    pub offset: u32,
    pub total: u32,
}

impl Data {
    /// The packet's header up to the extensions.
    pub fn packet(&self, id: u64, flags: u8, opcode: u8) -> Packet {
        Packet::new(kind::DATA, flags, id)
            .u8(self.path)
            .u8(opcode)
            .u16(self.epoch)
            .u32(self.sequence)
            .u32(self.time)
            .u32(self.dst)
            .u32(self.src)
            .u32(self.sseq)
            .u32(self.msn)
            .u32(self.number)
            .u32(self.offset)
            .u32(self.total)
    }

    /// Reads one.
    pub fn read(p: &[u8]) -> Option<(u8, Self)> {
        let word = |at: usize| Some(u32::from_be_bytes(p.get(at..at + 4)?.try_into().ok()?));
        let data = Data {
            path: *p.get(16)?,
            epoch: (word(16)? & 0xffff) as u16,
            sequence: word(20)?,
            time: word(24)?,
            dst: word(28)? & 0xff_ffff,
            src: word(32)?,
            sseq: word(36)?,
            msn: word(40)?,
            number: word(44)?,
            offset: word(48)?,
            total: word(52)?,
        };
        Some((p[17], data))
    }
}

/// What Init, Cookie and Accept say.
#[derive(Clone, Copy)]
pub struct Handshake {
    pub source: [u8; 16],
    pub destination: [u8; 16],
    pub lowest: u8,
    pub paths: u8,
    pub id: u64,
    pub peer_id: u64,
    pub nonce: u64,
    pub cookie: u64,
}

impl Handshake {
    pub fn packet(&self, kind: u8) -> Packet {
        Packet::new(kind, 0, 0)
            .bytes(&self.source)
            .bytes(&self.destination)
            .u8(0)
            .u8(self.lowest)
            .u8(self.lowest.max(1))
            .u8(self.paths)
            .u32(1)
            .u32(1024)
            .u64(self.id)
            .u64(self.peer_id)
            .u64(self.nonce)
            .u64(0x1257)
            .u64(self.cookie)
            .u32(7)
            .u32(9)
            .u16(3)
            .bytes(&[0; 14])
            .header()
    }
}

/// The addresses of a packet.
#[derive(Clone, Copy)]
pub struct Route {
    pub to_mac: [u8; 6],
    pub from_mac: [u8; 6],
    pub to: [u8; 4],
    pub from: [u8; 4],
    pub from_port: u16,
    /// DSCP and ECN.
    pub tos: u8,
}

fn sum(bytes: &[u8]) -> u32 {
    bytes.chunks(2).map(|c| u32::from(c[0]) << 8 | u32::from(*c.get(1).unwrap_or(&0))).sum()
}

fn fold(mut s: u32) -> u16 {
    while s >> 16 != 0 {
        s = (s & 0xffff) + (s >> 16);
    }
    !(s as u16)
}

impl Route {
    /// The frame that carries `payload`, with the right checksums.
    pub fn frame(&self, payload: &[u8]) -> Vec<u8> {
        let udp = payload.len() as u16 + 8;
        let mut f = Vec::with_capacity(42 + payload.len());
        f.extend_from_slice(&self.to_mac);
        f.extend_from_slice(&self.from_mac);
        // IPv4, don't fragment, UDP.
        f.extend_from_slice(&[8, 0, 0x45, self.tos]);
        f.extend_from_slice(&(udp + 20).to_be_bytes());
        f.extend_from_slice(&[0, 0, 0x40, 0, 64, 17, 0, 0]);
        f.extend_from_slice(&self.from);
        f.extend_from_slice(&self.to);
        let header = fold(sum(&f[14..34]));
        f[24..26].copy_from_slice(&header.to_be_bytes());
        for word in [self.from_port, PORT, udp, 0] {
            f.extend_from_slice(&word.to_be_bytes());
        }
        f.extend_from_slice(payload);
        let pseudo = sum(&f[26..34]) + 17 + u32::from(udp);
        let check = match fold(pseudo + sum(&f[34..])) {
            0 => 0xffff,
            c => c,
        };
        f[40..42].copy_from_slice(&check.to_be_bytes());
        f
    }
}

/// A frame of the service port, taken apart.
pub struct Seen<'a> {
    pub route: Route,
    pub payload: &'a [u8],
    pub to_port: u16,
}

/// Reads a frame; None for those of others, for fragments and for several packets in one.
pub fn read(frame: &[u8]) -> Option<Seen<'_>> {
    if frame.get(12..15)? != [8, 0, 0x45] || *frame.get(23)? != 17 || frame.get(20)? & 0x3f != 0 {
        return None;
    }
    let word = |at: usize| Some(u16::from_be_bytes(frame.get(at..at + 2)?.try_into().ok()?));
    let (from_port, to_port, udp) = (word(34)?, word(36)?, usize::from(word(38)?));
    if to_port != PORT && from_port != PORT {
        return None;
    }
    let payload = frame.get(42..34 + udp)?;
    Some(Seen {
        route: Route {
            to_mac: frame[..6].try_into().ok()?,
            from_mac: frame[6..12].try_into().ok()?,
            from: frame[26..30].try_into().ok()?,
            to: frame[30..34].try_into().ok()?,
            from_port,
            tos: *frame.get(15)?,
        },
        payload,
        to_port,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crc_of_the_usual_text() {
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
    }

    #[test]
    fn frames_come_back() {
        let route = Route {
            to_mac: [1; 6],
            from_mac: [2; 6],
            to: [10, 0, 0, 1],
            from: [10, 0, 0, 2],
            from_port: 9,
            tos: 2,
        };
        let frame = route.frame(b"abc");
        let seen = read(&frame).expect("what was just written");
        assert_eq!((seen.payload, seen.to_port), (&b"abc"[..], PORT));
        assert_eq!(fold(sum(&frame[14..34])), 0);
        let pseudo = sum(&frame[26..34]) + 17 + 11;
        assert_eq!(fold(pseudo + sum(&frame[34..])), 0);
    }
}
