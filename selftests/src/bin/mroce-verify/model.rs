// SPDX-License-Identifier: GPL-2.0
//! The model of RC semantics: from a seed it plans the requests of one direction of one QP
//! and says what every byte and every completion must be. Both ends compute the same plan.
//!
//! What the model takes for granted, from the InfiniBand specification: requests of one QP act
//! at the responder in the order they were posted; a Write or atomic that follows a READ or
//! atomic of the same bytes needs a fence; receives are taken in order; completions come in
//! order, one for each signaled request.

#![forbid(unsafe_code)]

use selftests::rng::{self, Rng};
use selftests::verbs;

/// Kinds of requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// RDMA Write.
    Write,
    /// RDMA Write with immediate data.
    WriteImm,
    /// RDMA READ.
    Read,
    /// Send.
    Send,
    /// Send with immediate data.
    SendImm,
    /// Compare and swap.
    Cas,
    /// Fetch and add.
    Faa,
}

impl Kind {
    /// `IBV_WR_*`.
    pub fn opcode(self) -> u32 {
        match self {
            Kind::Write => verbs::IBV_WR_RDMA_WRITE,
            Kind::WriteImm => verbs::IBV_WR_RDMA_WRITE_WITH_IMM,
            Kind::Read => verbs::IBV_WR_RDMA_READ,
            Kind::Send => verbs::IBV_WR_SEND,
            Kind::SendImm => verbs::IBV_WR_SEND_WITH_IMM,
            Kind::Cas => verbs::IBV_WR_ATOMIC_CMP_AND_SWP,
            Kind::Faa => verbs::IBV_WR_ATOMIC_FETCH_AND_ADD,
        }
    }

    /// `IBV_WC_*` of the requester's completion.
    pub fn wc_opcode(self) -> u32 {
        match self {
            Kind::Write | Kind::WriteImm => verbs::IBV_WC_RDMA_WRITE,
            Kind::Read => verbs::IBV_WC_RDMA_READ,
            Kind::Send | Kind::SendImm => verbs::IBV_WC_SEND,
            Kind::Cas => verbs::IBV_WC_COMP_SWAP,
            Kind::Faa => verbs::IBV_WC_FETCH_ADD,
        }
    }

    /// True when the request takes a receive of the peer.
    pub fn takes_receive(self) -> bool {
        matches!(self, Kind::WriteImm | Kind::Send | Kind::SendImm)
    }

    /// True when data comes back.
    pub fn returns(self) -> bool {
        matches!(self, Kind::Read | Kind::Cas | Kind::Faa)
    }

    fn writes_target(self) -> bool {
        matches!(self, Kind::Write | Kind::WriteImm | Kind::Cas | Kind::Faa)
    }
}

/// One planned request.
#[derive(Clone, Debug)]
pub struct Op {
    /// What it is.
    pub kind: Kind,
    /// Local memory, as (offset, length): in the source region, or in the destination region
    /// for what returns data and for a chained source.
    pub local: Vec<(usize, usize)>,
    /// The source is what an earlier READ of this batch brought (the request carries a fence).
    pub chained: bool,
    /// Offset in the peer's target region.
    pub remote: usize,
    /// Bytes of the message.
    pub len: usize,
    /// Immediate data.
    pub imm: u32,
    /// `IBV_SEND_*`.
    pub flags: u32,
    /// Compare value, or the number to add.
    pub compare_add: u64,
    /// Swap value.
    pub swap: u64,
    /// What the message carries.
    pub payload: Vec<u8>,
    /// What must come back.
    pub result: Vec<u8>,
    /// No later request of the batch changes the bytes that it wrote.
    pub stable: bool,
}

impl Op {
    /// True when a completion is due.
    pub fn signaled(&self) -> bool {
        self.flags & verbs::IBV_SEND_SIGNALED != 0
    }
}

/// One planned receive.
#[derive(Clone, Debug)]
pub struct Receive {
    /// Memory in the receive region, as (offset, length).
    pub local: Vec<(usize, usize)>,
    /// Index of the request that takes it.
    pub op: usize,
}

/// What a plan may use.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Requests in the batch.
    pub count: usize,
    /// SGEs of a request or receive.
    pub max_sge: usize,
    /// Inline bytes.
    pub max_inline: usize,
    /// Unsignaled requests in a row.
    pub max_unsignaled: usize,
    /// Longest message.
    pub max_len: usize,
    /// Sizes around which lengths are chosen.
    pub boundaries: Vec<usize>,
    /// Bytes of the target region.
    pub target: usize,
    /// Bytes of the source region.
    pub source: usize,
    /// Bytes of the destination region.
    pub destination: usize,
    /// Bytes of the receive region.
    pub receive: usize,
    /// READs are used.
    pub reads: bool,
    /// Atomics are used.
    pub atomics: bool,
    /// Requests that take receives are used.
    pub sends: bool,
    /// Every request is signaled.
    pub signal_all: bool,
    /// Writes do not overlap (the target allows relaxed ordering).
    pub disjoint: bool,
    /// Receives are slots of this size (a shared queue), else they are cut to fit.
    pub slot: Option<usize>,
}

/// The plan of one direction of one QP for one batch.
#[derive(Clone, Debug, Default)]
pub struct Plan {
    /// Requests in the order of posting.
    pub ops: Vec<Op>,
    /// Receives in the order of posting.
    pub receives: Vec<Receive>,
}

/// What the image holds where nothing was written: a wrong write into a gap is seen.
pub const CANARY: u8 = 0xc5;

fn overlaps(a: (usize, usize), b: (usize, usize)) -> bool {
    a.1 > 0 && b.1 > 0 && a.0 < b.0 + b.1 && b.0 < a.0 + a.1
}

/// Cuts `len` bytes from `at` on into up to `max` pieces with gaps; gives pieces and the end.
fn scatter(rng: &mut Rng, at: usize, len: usize, max: usize) -> (Vec<(usize, usize)>, usize) {
    if len == 0 {
        return (Vec::new(), at);
    }
    let most = max.min(len).max(1);
    let pieces = if most == 1 || rng.one_in(2) { 1 } else { rng.range(1, most as u64) as usize };
    let mut out = Vec::with_capacity(pieces);
    let (mut at, mut left) = (at, len);
    for i in 0..pieces {
        let keep = pieces - 1 - i;
        let take = if keep == 0 { left } else { rng.range(1, (left - keep) as u64) as usize };
        at += rng.below(9) as usize;
        out.push((at, take));
        at += take;
        left -= take;
    }
    (out, at)
}

fn choose_len(rng: &mut Rng, limits: &Limits) -> usize {
    let len = match rng.below(10) {
        0 => rng.below(17),
        1..=4 if !limits.boundaries.is_empty() => {
            let b = *rng.pick(&limits.boundaries) as u64;
            (b + rng.below(3)).saturating_sub(1)
        }
        _ => {
            // Even over orders of magnitude.
            let bits = rng.below(u64::from(usize::BITS - limits.max_len.leading_zeros()) + 1);
            rng.below((1u64 << bits) + 1)
        }
    };
    usize::try_from(len).unwrap_or(usize::MAX).min(limits.max_len)
}

/// Plans a batch and carries `target` (the image of the peer's target region) over it.
pub fn plan(rng: &mut Rng, limits: &Limits, target: &mut [u8]) -> Plan {
    let mut plan = Plan::default();
    let (mut source_at, mut destination_at, mut receive_at) = (0, 0, 0);
    // Ranges of the target that READs and atomics since the last fence use.
    let mut read_ranges: Vec<(usize, usize)> = Vec::new();
    let mut unsignaled = 0;
    let mut disjoint_at = 0;
    let slack = 9 * limits.max_sge + 16;
    let mut kinds = vec![Kind::Write, Kind::Write, Kind::Write];
    if limits.reads {
        kinds.extend([Kind::Read, Kind::Read]);
    }
    if limits.atomics && !limits.disjoint {
        kinds.extend([Kind::Cas, Kind::Faa]);
    }
    if limits.sends {
        kinds.extend([Kind::Send, Kind::Send, Kind::SendImm, Kind::WriteImm]);
    }
    for index in 0..limits.count {
        let kind = *rng.pick(&kinds);
        let mut len = choose_len(rng, limits);
        if matches!(kind, Kind::Cas | Kind::Faa) {
            len = 8;
        }
        if kind.takes_receive() {
            len = len.min(limits.slot.unwrap_or(usize::MAX));
        }
        let mut inline = !kind.returns() && len <= limits.max_inline && rng.one_in(3);

        // Where the source is: what an earlier READ brought, or bytes of its own.
        let earlier: Vec<usize> = plan
            .ops
            .iter()
            .enumerate()
            .filter(|(_, op)| op.kind == Kind::Read && op.len > 0 && op.local.len() <= limits.max_sge)
            .map(|(i, _)| i)
            .collect();
        let chained = !kind.returns() && !earlier.is_empty() && rng.one_in(8);
        let (local, payload);
        if chained {
            let read = &plan.ops[*rng.pick(&earlier)];
            if kind.takes_receive() && read.len > limits.slot.unwrap_or(usize::MAX) {
                continue;
            }
            len = read.len;
            (local, payload) = (read.local.clone(), read.result.clone());
            inline = false;
        } else if kind.returns() {
            if destination_at + len + slack > limits.destination {
                continue;
            }
            // An atomic's result goes to one aligned word.
            let (pieces, end) = if kind == Kind::Read {
                scatter(rng, destination_at, len, limits.max_sge)
            } else {
                let at = destination_at.next_multiple_of(8);
                (vec![(at, 8)], at + 8)
            };
            destination_at = end;
            (local, payload) = (pieces, Vec::new());
        } else {
            if source_at + len + slack > limits.source {
                continue;
            }
            let (pieces, end) = scatter(rng, source_at, len, limits.max_sge);
            source_at = end;
            let mut bytes = vec![0; len];
            rng::fill(&mut bytes, rng.bits());
            (local, payload) = (pieces, bytes);
        }

        // Where it acts.
        let mut remote = 0;
        if kind.writes_target() || kind == Kind::Read {
            if len > limits.target {
                continue;
            }
            remote = rng.below((limits.target - len) as u64 + 1) as usize;
            if matches!(kind, Kind::Cas | Kind::Faa) {
                remote &= !7;
            } else if rng.one_in(3) {
                remote &= !63;
            }
            if limits.disjoint && kind.writes_target() {
                if disjoint_at + len > limits.target {
                    continue;
                }
                remote = disjoint_at;
                disjoint_at += len;
            }
            if limits.disjoint && kind == Kind::Read {
                // Only what this batch does not write: the upper end, as long as it is free.
                if len * 2 > limits.target {
                    continue;
                }
                remote = limits.target - len;
                if disjoint_at > remote {
                    continue;
                }
            }
        }
        let range = (remote, len);
        if limits.disjoint && kind.writes_target() && read_ranges.iter().any(|r| overlaps(*r, range)) {
            continue;
        }

        // Receives.

        if kind.takes_receive() {
            let carried = if kind == Kind::WriteImm { 0 } else { len };
            let local = match limits.slot {
                // Which slot it takes is decided by the shared queue.
                Some(_) => Vec::new(),
                None => {
                    let room = carried + if rng.one_in(2) { rng.below(100) as usize } else { 0 };
                    if receive_at + room + slack > limits.receive {
                        continue;
                    }
                    let (pieces, end) = scatter(rng, receive_at, room, limits.max_sge);
                    receive_at = end;
                    pieces
                }
            };

            plan.receives.push(Receive { local, op: plan.ops.len() });
        }

        let mut flags = 0;
        let conflict = kind.writes_target() && read_ranges.iter().any(|r| overlaps(*r, range));
        if chained || conflict || rng.one_in(12) {
            flags |= verbs::IBV_SEND_FENCE;
            read_ranges.clear();
        }
        if kind.returns() {
            read_ranges.push(range);
        }
        if inline {
            flags |= verbs::IBV_SEND_INLINE;
        }
        if kind.takes_receive() && rng.one_in(2) {
            flags |= verbs::IBV_SEND_SOLICITED;
        }
        let last = index + 1 == limits.count;
        if limits.signal_all || last || unsignaled >= limits.max_unsignaled || rng.one_in(2) {
            flags |= verbs::IBV_SEND_SIGNALED;
            unsignaled = 0;
        } else {
            unsignaled += 1;
        }

        let mut op = Op {
            kind,
            local,
            chained,
            remote,
            len,
            imm: rng.bits() as u32,
            flags,
            compare_add: rng.bits(),
            swap: rng.bits(),
            payload,
            result: Vec::new(),
            stable: true,
        };
        if kind == Kind::Cas && rng.one_in(2) {
            // One that hits.
            op.compare_add = word_at(target, remote);
        }
        apply(&mut op, target);
        if kind.writes_target() {
            for earlier in &mut plan.ops {
                if earlier.kind.writes_target() && overlaps((earlier.remote, earlier.len), range) {
                    earlier.stable = false;
                }
            }
        }
        plan.ops.push(op);
    }
    // The last one completes visibly, whatever was left out above.
    if let Some(op) = plan.ops.last_mut() {
        op.flags |= verbs::IBV_SEND_SIGNALED;
    }
    plan
}

fn word_at(target: &[u8], at: usize) -> u64 {
    target.get(at..at + 8).and_then(|b| b.try_into().ok()).map_or(0, u64::from_le_bytes)
}

/// Lets `op` act on the image of the target region; fills in what must come back.
fn apply(op: &mut Op, target: &mut [u8]) {
    let range = op.remote..op.remote + op.len;
    match op.kind {
        Kind::Write | Kind::WriteImm => target[range].copy_from_slice(&op.payload),
        Kind::Read => op.result = target[range].to_vec(),
        Kind::Cas | Kind::Faa => {
            let old = word_at(target, op.remote);
            let new = match op.kind {
                Kind::Cas if old == op.compare_add => op.swap,
                Kind::Cas => old,
                _ => old.wrapping_add(op.compare_add),
            };
            target[range].copy_from_slice(&new.to_le_bytes());
            op.result = old.to_le_bytes().to_vec();
        }
        Kind::Send | Kind::SendImm => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits() -> Limits {
        Limits {
            count: 300,
            max_sge: 4,
            max_inline: 64,
            max_unsignaled: 7,
            max_len: 5000,
            boundaries: vec![1024, 4096],
            target: 20_000,
            source: 1 << 20,
            destination: 1 << 20,
            receive: 1 << 20,
            reads: true,
            atomics: true,
            sends: true,
            signal_all: false,
            disjoint: false,
            slot: None,
        }
    }

    #[test]
    fn both_ends_plan_alike() {
        let run = || {
            let mut target = vec![CANARY; 20_000];
            let plan = plan(&mut Rng::new(5), &limits(), &mut target);
            (format!("{:?}", plan.ops), target)
        };
        assert_eq!(run(), run());
    }

    #[test]
    fn plans_respect_limits_and_hazards() {
        for seed in 0..50 {
            let l = limits();
            let mut target = vec![CANARY; l.target];
            let plan = plan(&mut Rng::new(seed), &l, &mut target);
            let (mut reads, mut unsignaled): (Vec<(usize, usize)>, usize) = (Vec::new(), 0);
            for op in &plan.ops {
                assert!(op.local.len() <= l.max_sge);
                assert_eq!(op.local.iter().map(|p| p.1).sum::<usize>(), op.len);
                if op.flags & verbs::IBV_SEND_FENCE != 0 {
                    reads.clear();
                }
                if op.kind.writes_target() {
                    assert!(reads.iter().all(|r| !overlaps(*r, (op.remote, op.len))));
                }
                if op.kind.returns() {
                    reads.push((op.remote, op.len));
                    assert_eq!(op.result.len(), op.len);
                }
                assert!(op.flags & verbs::IBV_SEND_INLINE == 0 || op.len <= l.max_inline);
                unsignaled = if op.signaled() { 0 } else { unsignaled + 1 };
                assert!(unsignaled <= l.max_unsignaled);
            }
            assert!(plan.ops.last().is_some_and(Op::signaled));
        }
    }

    #[test]
    fn pieces_do_not_overlap() {
        let l = limits();
        let plan = plan(&mut Rng::new(3), &l, &mut vec![0; l.target]);
        let mut used: Vec<_> = plan
            .ops
            .iter()
            .filter(|o| !o.kind.returns() && !o.chained)
            .flat_map(|o| o.local.clone())
            .collect();
        used.sort_unstable();
        assert!(used.windows(2).all(|w| w[0].0 + w[0].1 <= w[1].0));
    }

    #[test]
    fn disjoint_plans_do_not_overwrite() {
        let l = Limits { disjoint: true, ..limits() };
        let plan = plan(&mut Rng::new(9), &l, &mut vec![0; l.target]);
        assert!(plan.ops.iter().all(|op| op.stable));
        assert!(plan.ops.iter().any(|op| op.kind == Kind::Read));
    }
}
