// SPDX-License-Identifier: GPL-2.0

//! Data packets: path header, stream header, extensions by opcode.

#![forbid(unsafe_code)]

use super::bytes::Reader;
use super::{begin, Drop, Type, Writer, BASE_LEN};
use super::{FLAG_ACK_REQUEST, FLAG_AFTER, FLAG_LAST, FLAG_SOLICITED};
use crate::proto::api::{Opcode, StreamHeader, MAX_MESSAGE};

/// Header bytes of the shortest data packet (VOID).
pub const DATA_MIN: usize = BASE_LEN + 12;

/// The path half of a data packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathHeader {
    /// Path index.
    pub path: u8,
    /// Epoch of the path's sequence.
    pub epoch: u16,
    /// Number in that epoch; a resend keeps it.
    pub sequence: u32,
    /// Send time of this very transmission, in units of 64 ns, later ones of the same path
    /// being greater.
    pub timestamp: u32,
    /// An acknowledgement is wanted at once.
    pub ack_request: bool,
}

const QPN_MASK: u32 = 0xff_ffff;

fn opcode(v: u8) -> Option<Opcode> {
    Some(match v {
        0 => Opcode::Void,
        1 => Opcode::Write,
        2 => Opcode::WriteImm,
        3 => Opcode::Send,
        4 => Opcode::SendImm,
        5 => Opcode::SendInv,
        6 => Opcode::ReadRequest,
        7 => Opcode::CompareSwap,
        8 => Opcode::FetchAdd,
        9 => Opcode::ReadResponse,
        10 => Opcode::AtomicResponse,
        _ => return None,
    })
}

/// Which extensions an opcode has.
struct Shape {
    address: bool,
    immediate: bool,
    request: bool,
    oldest: bool,
    operand: bool,
    swap: bool,
    after: bool,
}

fn shape(op: Opcode, last: bool) -> Shape {
    use Opcode as O;
    let atomic = matches!(op, O::CompareSwap | O::FetchAdd);
    Shape {
        address: atomic || matches!(op, O::Write | O::WriteImm | O::ReadRequest),
        immediate: last && matches!(op, O::WriteImm | O::SendImm | O::SendInv),
        request: atomic || matches!(op, O::ReadRequest | O::ReadResponse | O::AtomicResponse),
        oldest: atomic || matches!(op, O::ReadRequest),
        operand: atomic || matches!(op, O::AtomicResponse),
        swap: matches!(op, O::CompareSwap),
        after: matches!(op, O::Write | O::WriteImm),
    }
}

/// Writes a data header.
pub(crate) fn emit(w: &mut Writer<'_>, connection_id: u64, p: &PathHeader, s: &StreamHeader) {
    let mut flags = 0;
    if p.ack_request {
        flags |= FLAG_ACK_REQUEST;
    }
    let shape = shape(s.opcode, s.last);
    let void = s.opcode == Opcode::Void;
    let after = s.after.filter(|_| shape.after);
    if !void {
        if s.last {
            flags |= FLAG_LAST;
        }
        if s.solicited {
            flags |= FLAG_SOLICITED;
        }
        if after.is_some() {
            flags |= FLAG_AFTER;
        }
    }
    begin(w, Type::Data, flags, connection_id);
    w.u8(p.path);
    w.u8(s.opcode as u8);
    w.u16(p.epoch);
    w.u32(p.sequence);
    w.u32(p.timestamp);
    if void {
        return;
    }
    w.u32(u32::from(s.round) << 24 | s.dst_qpn & QPN_MASK);
    w.u32(s.src_qpn & QPN_MASK);
    w.u32(s.sseq);
    w.u32(s.msn);
    w.u32(if shape.request { s.request } else { s.rmsn });
    w.u32(s.offset);
    w.u32(s.total);
    if shape.address {
        w.u64(s.va);
        w.u32(s.rkey);
    }
    if shape.immediate {
        w.u32(s.imm);
    }
    if let Some(after) = after {
        w.u32(after);
    }
    if shape.oldest {
        w.u32(s.oldest);
    }
    if shape.operand {
        w.u64(s.compare_add);
    }
    if shape.swap {
        w.u64(s.swap);
    }
}

/// Reads what follows the base header of a data packet.
pub(super) fn parse(flags: u8, r: &mut Reader<'_>) -> Result<(PathHeader, StreamHeader), Drop> {
    if flags & !(FLAG_ACK_REQUEST | FLAG_LAST | FLAG_SOLICITED | FLAG_AFTER) != 0 {
        return Err(Drop::Field);
    }
    let path = r.u8()?;
    let op = opcode(r.u8()?).ok_or(Drop::Field)?;
    let p = PathHeader {
        path,
        epoch: r.u16()?,
        sequence: r.u32()?,
        timestamp: r.u32()?,
        ack_request: flags & FLAG_ACK_REQUEST != 0,
    };
    let mut s = StreamHeader {
        opcode: op,
        last: flags & FLAG_LAST != 0,
        solicited: flags & FLAG_SOLICITED != 0,
        ..StreamHeader::default()
    };
    if op == Opcode::Void {
        return if flags & !FLAG_ACK_REQUEST == 0 {
            Ok((p, s))
        } else {
            Err(Drop::Field)
        };
    }
    let dst = r.u32()?;
    let src = r.u32()?;
    if src & !QPN_MASK != 0 {
        return Err(Drop::Field);
    }
    s.round = (dst >> 24) as u8;
    s.dst_qpn = dst & QPN_MASK;
    s.src_qpn = src;
    s.sseq = r.u32()?;
    s.msn = r.u32()?;
    let number = r.u32()?;
    s.offset = r.u32()?;
    s.total = r.u32()?;
    let shape = shape(op, s.last);
    if shape.request {
        s.request = number;
    } else {
        s.rmsn = number;
    }
    if shape.address {
        s.va = r.u64()?;
        s.rkey = r.u32()?;
    }
    if shape.immediate {
        s.imm = r.u32()?;
    }
    if flags & FLAG_AFTER != 0 {
        if !shape.after {
            return Err(Drop::Field);
        }
        s.after = Some(r.u32()?);
    }
    if shape.oldest {
        s.oldest = r.u32()?;
    }
    if shape.operand {
        s.compare_add = r.u64()?;
    }
    if shape.swap {
        s.swap = r.u64()?;
    }
    // A range that goes beyond the last address is not malformed: the responder refuses it
    // like any other that is not registered.
    if s.total > MAX_MESSAGE || s.offset > s.total {
        return Err(Drop::Field);
    }
    Ok((p, s))
}

/// Whether `len` payload bytes are what the header announces.
pub(super) fn payload_fits(s: &StreamHeader, len: u32) -> bool {
    match s.opcode {
        Opcode::Void => len == 0,
        Opcode::ReadRequest => len == 0 && s.last && s.offset == 0,
        Opcode::CompareSwap | Opcode::FetchAdd | Opcode::AtomicResponse => {
            len == 0 && s.last && s.offset == 0 && s.total == 8
        }
        _ => match s.offset.checked_add(len) {
            Some(end) => (end == s.total) == s.last && end <= s.total && (len != 0 || s.total == 0),
            None => false,
        },
    }
}
