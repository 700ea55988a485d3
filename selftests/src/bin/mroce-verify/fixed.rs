// SPDX-License-Identifier: GPL-2.0
//! One request at a time: every opcode at every size that matters, inline data, the longest
//! message, large and huge-page regions, invalidation, re-registration.

#![forbid(unsafe_code)]

use crate::model::CANARY;
use crate::Run;
use selftests::endpoint::{usual_payloads, Endpoint, Remote, ALL_ACCESS};
use selftests::ktap::Outcome;
use selftests::rng::Rng;
use selftests::single::Single;
use selftests::sys::{self, errno, errno_name, Memory};
use selftests::verbs::{self, Bind, Mr, QpInit, SendWr, Sge};
use selftests::{check, fail, skip};
use std::sync::Arc;
use std::time::Duration;

/// Bytes before and after each target that must stay as they are.
const GUARD: usize = 128;

/// The sizes: 0, powers of two, multiples of the payload MTU, and their neighbours.
pub fn size_list(run: &Run) -> Vec<usize> {
    let mut sizes = vec![0];
    let mut around = |n: usize| {
        for s in [n.saturating_sub(1), n, n + 1] {
            if s <= run.max_size {
                sizes.push(s);
            }
        }
    };
    let most = if run.short { 16 } else { 26 };
    for bits in 0..=most {
        around(1 << bits);
    }
    for multiple in [1, 2, 3, 4, 5, 8, 15, 16, 17, 31, 32, 64, 255, 256, 257, 1024, 4096] {
        around(multiple * run.payload);
    }
    // The inline maximum, and what packets carry on other links.
    for n in std::iter::once(236).chain(usual_payloads()) {
        around(n);
    }
    sizes.push(run.max_size);
    sizes.sort_unstable();
    sizes.dedup();
    sizes
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Write,
    WriteImm,
    Read,
    Send,
    SendImm,
}

/// Every size with every opcode that moves data, from both ends in turn.
pub fn sizes(run: &Run, ep: &Endpoint) -> Outcome {
    let max_sge = ep.device.max_sge.clamp(1, 8) as u64;
    let max_sge = max_sge.min(ep.oob().exchange(&[max_sge]).map_err(|e| e.to_string())?[0]) as u32;
    let single = Single::new(ep, &run.tuning(), 8, max_sge, 0)?;
    let size = run.max_size + 2 * GUARD + 64 * max_sge as usize;
    let local =
        ep.memory(size, verbs::IBV_ACCESS_LOCAL_WRITE).map_err(|e| format!("reg_mr of {size} bytes: {e}"))?;
    let target = ep.memory(size, ALL_ACCESS).map_err(|e| format!("reg_mr of {size} bytes: {e}"))?;
    let remote = ep.exchange_memory(&[&target]).map_err(|e| e.to_string())?[0];
    let sizes = Sizes { ep, single, local, target, remote, max_sge };
    let list = size_list(run);
    let mut moved = 0u64;
    for (n, len) in list.iter().copied().enumerate() {
        for kind in [Kind::Write, Kind::WriteImm, Kind::Read, Kind::Send, Kind::SendImm] {
            for leader_sends in [true, false] {
                // Large ones in one direction only.
                if !leader_sends && len > 1 << 20 {
                    continue;
                }
                let mut rng = Rng::of(&[run.seed, 10, n as u64, kind as u64, u64::from(leader_sends)]);
                sizes.one(kind, len, leader_sends, &mut rng)?;
                moved += len as u64;
            }
        }
    }
    run.note(ep, &format!("{} sizes up to {}, {} MiB moved", list.len(), run.max_size, moved >> 20));
    Ok(())
}

/// What the requests of every size share: a QP, and a region to work from and one to aim at.
struct Sizes<'a> {
    ep: &'a Endpoint,
    single: Single,
    local: Arc<Mr>,
    target: Arc<Mr>,
    remote: Remote,
    max_sge: u32,
}

impl Sizes<'_> {
    /// One request of `kind` over `len` bytes, its data and its completions checked.
    fn one(&self, kind: Kind, len: usize, leader_sends: bool, rng: &mut Rng) -> Outcome {
        let Self { ep, single, local, target, remote, max_sge } = self;
        let seed = rng.bits();
        let at = GUARD + if rng.one_in(2) { 0 } else { rng.below(64) as usize };
        let from = GUARD + if rng.one_in(2) { 0 } else { rng.below(64) as usize };
        let pieces = if len < 2 { 1 } else { rng.range(1, u64::from(*max_sge).min(len as u64)) as usize };
        let imm = rng.bits() as u32;
        let what = format!("{kind:?} of {len} bytes to offset {at} from {from}, {pieces} SGEs");
        let sges = |mr: &Mr, at: usize| -> Vec<Sge> {
            if len == 0 {
                return Vec::new();
            }
            let step = len / pieces;
            (0..pieces)
                .map(|i| mr.sge(at + i * step, if i + 1 == pieces { len - i * step } else { step }))
                .collect()
        };
        if leader_sends == ep.leads {
            // This end requests. The peer says when it is ready and, after the completion, what it found.
            if kind == Kind::Read {
                local.memory.set(from - GUARD, len + 2 * GUARD, CANARY);
            } else {
                local.memory.fill(from, len, seed);
            }
            ep.barrier("ready").map_err(|e| format!("{what}: {e}"))?;
            single.run(
                ep,
                &what,
                SendWr {
                    sges: sges(local, from),
                    opcode: match kind {
                        Kind::Write => verbs::IBV_WR_RDMA_WRITE,
                        Kind::WriteImm => verbs::IBV_WR_RDMA_WRITE_WITH_IMM,
                        Kind::Read => verbs::IBV_WR_RDMA_READ,
                        Kind::Send => verbs::IBV_WR_SEND,
                        Kind::SendImm => verbs::IBV_WR_SEND_WITH_IMM,
                    },
                    imm,
                    remote_addr: remote.addr + at as u64,
                    rkey: remote.rkey,
                    ..SendWr::default()
                },
            )?;
            if kind == Kind::Read {
                guarded(local, from, len, seed).map_err(|e| format!("{what}: {e}"))?;
            } else {
                // The source is free now; a completion that came too early shows at the peer.
                local.memory.set(from, len, 0xee);
            }
            ep.barrier("verified").map_err(|e| format!("{what}: {e}"))?;
            return Ok(());
        }
        if kind == Kind::Read {
            target.memory.fill(at, len, seed);
            ep.barrier("ready").map_err(|e| format!("{what}: {e}"))?;
            ep.barrier("verified").map_err(|e| format!("{what}: {e}"))?;
            return Ok(());
        }
        target.memory.set(at - GUARD, len + 2 * GUARD, CANARY);
        match kind {
            Kind::Write | Kind::Read => {}
            Kind::WriteImm => {
                single.qp.post_recv(len as u64, &[]).map_err(|e| format!("{what}: post_recv: {e}"))?
            }
            Kind::Send | Kind::SendImm => {
                single
                    .qp
                    .post_recv(len as u64, &sges(target, at))
                    .map_err(|e| format!("{what}: post_recv: {e}"))?;
            }
        }
        ep.barrier("ready").map_err(|e| format!("{what}: {e}"))?;
        if kind != Kind::Write {
            let wc = single.success(ep, &what)?;
            check!(wc.wr_id == len as u64, "{what}: receive with wr_id {}", wc.wr_id);
            check!(wc.byte_len as usize == len, "{what}: byte_len {}", wc.byte_len);
            let opcode =
                if kind == Kind::WriteImm { verbs::IBV_WC_RECV_RDMA_WITH_IMM } else { verbs::IBV_WC_RECV };
            check!(wc.opcode == opcode, "{what}: opcode {}", wc.opcode);
            if kind != Kind::Send {
                check!(
                    verbs::wc_imm(&wc) == imm,
                    "{what}: immediate data {:#x} instead of {imm:#x}",
                    verbs::wc_imm(&wc)
                );
            }
            guarded(target, at, len, seed).map_err(|e| format!("{what}: {e}"))?;
        }
        ep.barrier("verified").map_err(|e| format!("{what}: {e}"))?;
        guarded(target, at, len, seed).map_err(|e| format!("{what}: {e}"))?;
        Ok(())
    }
}

/// The pattern at `at`, and the canary around it.
fn guarded(mr: &Mr, at: usize, len: usize, seed: u64) -> Result<(), String> {
    mr.memory.verify(at, len, seed).map_err(|m| m.to_string())?;
    for (name, range) in [("before", at - GUARD..at), ("after", at + len..at + len + GUARD)] {
        if let Some(i) = range.clone().find(|i| mr.memory.byte(*i) != CANARY) {
            return Err(format!(
                "a byte {name} the data was written, at distance {}",
                if name == "before" { at - i } else { i - at - len }
            ));
        }
    }
    Ok(())
}

/// Inline data up to the maximum; the source changes right after the post; one byte more is refused.
pub fn inline(run: &Run, ep: &Endpoint) -> Outcome {
    // Ask for more and more until the device refuses.
    let cq = ep.cq(64).map_err(|e| format!("create_cq: {e}"))?;
    let mut best = 0;
    for wish in [1024u32, 512, 256, 236, 128, 64, 32, 16] {
        if let Ok(qp) = ep.pd.create_qp(&QpInit::rc(&cq, &cq, 16, 2, wish)) {
            best = qp.cap.max_inline_data;
            break;
        }
    }
    if best == 0 {
        skip!("no inline data");
    }
    let single = Single::new(ep, &run.tuning(), 16, 4, best)?;
    let most = single.qp.cap.max_inline_data as usize;
    let local = ep.memory(8192, verbs::IBV_ACCESS_LOCAL_WRITE).map_err(|e| e.to_string())?;
    let target = ep.memory(8192, ALL_ACCESS).map_err(|e| e.to_string())?;
    let remote = ep.exchange_memory(&[&target]).map_err(|e| e.to_string())?[0];
    let other = ep.oob().exchange(&[most as u64]).map_err(|e| e.to_string())?[0] as usize;
    let lens = |most: usize| [0, 1, 7, 8, 9, 16, 63, 64, 65, most / 2, most - 1, most];
    for leader_sends in [true, false] {
        let sending = leader_sends == ep.leads;
        for len in lens(if sending { most } else { other }) {
            let seed = Rng::of(&[run.seed, 20, len as u64]).bits();
            let what = format!("inline Write of {len} bytes");
            if !sending {
                target.memory.set(0, 4096, CANARY);
                ep.barrier("ready").map_err(|e| e.to_string())?;
                ep.barrier("written").map_err(|e| e.to_string())?;
                guarded(&target, GUARD, len, seed).map_err(|e| format!("{what}: {e}"))?;
                continue;
            }
            ep.barrier("ready").map_err(|e| e.to_string())?;
            local.memory.fill(0, len, seed);
            let half = len / 2;
            let sges = match len {
                0 => vec![],
                1 => vec![local.sge(0, 1)],
                _ => vec![local.sge(0, half), local.sge(half, len - half)],
            };
            let wr = SendWr {
                sges,
                opcode: verbs::IBV_WR_RDMA_WRITE,
                flags: verbs::IBV_SEND_INLINE | verbs::IBV_SEND_SIGNALED,
                remote_addr: remote.addr + GUARD as u64,
                rkey: remote.rkey,
                ..SendWr::default()
            };
            single.qp.post_send(&[wr]).map_err(|e| format!("{what}: {e}"))?;
            local.memory.set(0, 4096, 0xee);
            single.success(ep, &what)?;
            ep.barrier("written").map_err(|e| e.to_string())?;
        }
    }
    let wr = SendWr {
        sges: vec![local.sge(0, most + 1)],
        opcode: verbs::IBV_WR_RDMA_WRITE,
        flags: verbs::IBV_SEND_INLINE | verbs::IBV_SEND_SIGNALED,
        remote_addr: remote.addr,
        rkey: remote.rkey,
        ..SendWr::default()
    };
    match single.qp.post_send(&[wr]) {
        Ok(()) => fail!("inline data of {} bytes was taken, the maximum is {most}", most + 1),
        Err(error) => {
            let code = error.error.raw_os_error().unwrap_or(0);
            check!(
                code == errno::EINVAL || code == errno::ENOMEM,
                "inline data above the maximum: {} instead of EINVAL",
                errno_name(code)
            );
        }
    }
    ep.barrier("inline done").map_err(|e| e.to_string())?;
    run.note(ep, &format!("inline maximum {most}"));
    Ok(())
}

/// Bytes that Write and READ move at most where the kernel is a process: each page of the region
/// that they aim at takes one of the 65,530 mappings that the host allows, and so does each of
/// the buffer. In full they move in a virtual machine (suite max-msg-size-stock).
const REGION_OF_PROCESS: u64 = 100 << 20;

/// max_msg_sz works, by repeated SGEs over one buffer, and one byte more is refused at post. A
/// Send has such a list at both ends. Write and READ have it at the requester; at the responder
/// one MiB of memory is mapped over and over, and registered as one region.
pub fn max_msg_size(run: &Run, ep: &Endpoint) -> Outcome {
    let own = u64::from(ep.port.max_msg_sz);
    let most = own.min(ep.oob().exchange(&[own]).map_err(|e| e.to_string())?[0]);
    let sge = ep.device.max_sge.clamp(1, 32) as u64;
    let sge = sge.min(ep.oob().exchange(&[sge]).map_err(|e| e.to_string())?[0]);
    if most == 0 {
        fail!("max_msg_sz is 0");
    }
    // The short set moves 64 MiB instead of gigabytes; the limit itself is checked in any case.
    let sent = if run.short { most.min(64 << 20) } else { most.min(run.max_message) };
    let limit = if sys::kernel_is_process() { REGION_OF_PROCESS } else { u64::MAX };
    let moved = sent.min(limit);
    let single = Single::new(ep, &run.tuning(), 8, sge as u32, 0)?;
    let seed = Rng::of(&[run.seed, 30]).bits();
    let timeout = ep.wait + Duration::from_secs(sent >> 22);

    // The content repeats with `unit`, so that each piece of a message may overwrite another.
    let unit = 1usize << 20;
    let piece = (sent.div_ceil(sge) as usize).next_multiple_of(unit);
    let buffer = ep.memory(piece, ALL_ACCESS).map_err(|e| format!("reg_mr of {piece} bytes: {e}"))?;
    let sges = |bytes: u64| -> Vec<Sge> {
        let (mut left, mut out) = (bytes as usize, Vec::new());
        while left > 0 {
            out.push(buffer.sge(0, left.min(piece)));
            left -= left.min(piece);
        }
        out
    };
    let fill = || (0..piece).step_by(unit).for_each(|at| buffer.memory.fill(at, unit, seed));
    let verify = |bytes: u64, what: &str| -> Outcome {
        let used = piece.min(bytes as usize);
        for at in (0..used).step_by(unit) {
            let found = buffer.memory.verify(at, unit.min(used - at), seed);
            found.map_err(|m| format!("{what}, at {at:#x}: {m}"))?;
        }
        Ok(())
    };
    let region = Memory::repeated(unit, (moved as usize).div_ceil(unit)).map(Arc::new);
    let region = region.map_err(|e| e.to_string())?;
    let far = ep
        .pd
        .reg(&region, ALL_ACCESS)
        .map_err(|e| format!("reg_mr of {} bytes (one MiB, mapped over and over): {e}", region.len()))?;
    let remote = ep.exchange_memory(&[&far]).map_err(|e| e.to_string())?[0];
    let request = |opcode, sges| SendWr {
        sges,
        opcode,
        flags: verbs::IBV_SEND_SIGNALED,
        remote_addr: remote.addr,
        rkey: remote.rkey,
        ..SendWr::default()
    };
    const OPCODES: [(u32, &str); 3] = [
        (verbs::IBV_WR_SEND, "Send"),
        (verbs::IBV_WR_RDMA_WRITE, "Write"),
        (verbs::IBV_WR_RDMA_READ, "READ"),
    ];
    for (opcode, name) in OPCODES {
        let bytes = if opcode == verbs::IBV_WR_SEND { sent } else { moved };
        let list = sges(bytes);
        let what = format!("{name} of {bytes} bytes, {} SGEs over one buffer", list.len());
        let read = opcode == verbs::IBV_WR_RDMA_READ;
        region.set(0, unit, CANARY);
        buffer.memory.set(0, piece, CANARY);
        if ep.leads {
            if !read {
                fill();
            }
            ep.barrier("ready").map_err(|e| e.to_string())?;
            single.qp.post_send(&[request(opcode, list)]).map_err(|e| format!("{what}: {e}"))?;
            single.success_within(timeout, &what)?;
            if read {
                verify(bytes, &what)?;
            }
            ep.barrier_within(timeout, "moved").map_err(|e| e.to_string())?;
            continue;
        }
        match opcode {
            verbs::IBV_WR_SEND => {
                single.qp.post_recv(9, &list).map_err(|e| format!("{what}: post_recv: {e}"))?
            }
            verbs::IBV_WR_RDMA_READ => region.fill(0, unit, seed),
            _ => {}
        }
        ep.barrier("ready").map_err(|e| e.to_string())?;
        if opcode == verbs::IBV_WR_SEND {
            let wc = single.success_within(timeout, &what)?;
            check!(u64::from(wc.byte_len) == bytes, "{what}: byte_len {}", wc.byte_len);
        }
        ep.barrier_within(timeout, "moved").map_err(|e| e.to_string())?;
        match opcode {
            verbs::IBV_WR_SEND => verify(bytes, &what)?,
            verbs::IBV_WR_RDMA_WRITE => region.verify(0, unit, seed).map_err(|m| format!("{what}: {m}"))?,
            _ => {}
        }
    }
    // One byte more than the device's own limit.
    if let (true, Some(above)) = (ep.leads, ep.port.max_msg_sz.checked_add(1)) {
        for (opcode, name) in OPCODES {
            let what = format!("a {name} of max_msg_sz + 1 bytes ({above})");
            match single.qp.post_send(&[request(opcode, vec![Sge::raw(far.addr(0), above, far.lkey)])]) {
                Err(error) => {
                    let code = error.error.raw_os_error().unwrap_or(0);
                    check!(code == errno::EINVAL, "{what}: {} instead of EINVAL", errno_name(code));
                }
                Ok(()) => fail!("{what} was taken"),
            }
        }
    }
    ep.barrier("max_msg_size done").map_err(|e| e.to_string())?;
    run.note(ep, &format!("max_msg_sz {own}; moved: Send {sent}, Write and READ {moved} bytes"));
    Ok(())
}

fn region_test(
    run: &Run,
    ep: &Endpoint,
    memory: Arc<Memory>,
    offsets: &[usize],
    unit: Option<usize>,
) -> Outcome {
    let mr = ep.pd.reg(&memory, ALL_ACCESS).map_err(|e| format!("reg_mr of {} bytes: {e}", memory.len()))?;
    let small = ep.memory(1 << 20, ALL_ACCESS).map_err(|e| e.to_string())?;
    let remote = ep.exchange_memory(&[&mr]).map_err(|e| e.to_string())?[0];
    run.note(ep, &format!("a region of {} MiB, {} places", memory.len() >> 20, offsets.len()));
    let single = Single::new(ep, &run.tuning(), 8, 1, 0)?;
    for (i, at) in offsets.iter().copied().enumerate() {
        let len = 70_001;
        let seed = Rng::of(&[run.seed, 40, i as u64]).bits();
        let what = format!("{len} bytes at offset {at:#x} of {:#x}", memory.len());
        if ep.leads {
            small.memory.fill(0, len, seed);
            let wr = |opcode| SendWr {
                sges: vec![small.sge(0, len)],
                opcode,
                remote_addr: remote.addr + at as u64,
                rkey: remote.rkey,
                ..SendWr::default()
            };
            ep.barrier("ready").map_err(|e| e.to_string())?;
            single.run(ep, &format!("Write of {what}"), wr(verbs::IBV_WR_RDMA_WRITE))?;
            ep.barrier("written").map_err(|e| e.to_string())?;
            small.memory.set(0, len, 0);
            single.run(ep, &format!("READ of {what}"), wr(verbs::IBV_WR_RDMA_READ))?;
            small.memory.verify(0, len, seed).map_err(|m| format!("READ of {what}: {m}"))?;
            // The large region as a local source: back to its beginning at the peer.
            let sge = SendWr {
                sges: vec![mr.sge(at, len)],
                opcode: verbs::IBV_WR_RDMA_READ,
                remote_addr: remote.addr + at as u64,
                rkey: remote.rkey,
                ..SendWr::default()
            };
            single.run(ep, &format!("READ into {what}"), sge)?;
            memory.verify(at, len, seed).map_err(|m| format!("READ into {what}: {m}"))?;
            ep.barrier("next").map_err(|e| e.to_string())?;
        } else {
            let place = unit.map_or(at, |unit| at % unit);
            if unit.is_none_or(|unit| place + len <= unit) {
                memory.set(place, len, CANARY);
            }
            ep.barrier("ready").map_err(|e| e.to_string())?;
            ep.barrier("written").map_err(|e| e.to_string())?;
            memory.verify(at, len, seed).map_err(|m| format!("Write of {what}: {m}"))?;
            ep.barrier("next").map_err(|e| e.to_string())?;
        }
    }
    Ok(())
}

/// A region of more than 4 GiB (little memory, mapped over and over): offsets do not wrap.
pub fn big_region(run: &Run, ep: &Endpoint) -> Outcome {
    if sys::kernel_is_process() {
        skip!("this kernel is a process and cannot map that much");
    }
    let unit = 4 << 20;
    let times = if run.short { 300 } else { 1300 };
    let memory = Arc::new(Memory::repeated(unit, times).map_err(|e| e.to_string())?);
    let total = memory.len();
    let mut offsets = vec![0, 1, total / 2 + 3, total - 70_001];
    if total > 5 << 30 {
        offsets.extend([(4 << 30) - 35_000, (4 << 30) + 1, (2 << 30) - 1]);
    }
    region_test(run, ep, memory, &offsets, Some(unit))
}

/// A region of huge pages.
pub fn huge_pages(run: &Run, ep: &Endpoint) -> Outcome {
    let memory = Memory::huge(4 << 20);
    let both = ep.oob().exchange(&[u64::from(memory.is_ok())]).map_err(|e| e.to_string())?;
    let memory = match memory {
        Ok(memory) if both[0] == 1 => memory,
        Ok(_) => skip!("the other end has no huge pages"),
        Err(error) => skip!("no huge pages: {error}"),
    };
    region_test(
        run,
        ep,
        Arc::new(memory),
        &[0, 4095, (2 << 20) - 35_000, (2 << 20) + 1, (4 << 20) - 70_001],
        None,
    )
}

/// SEND_WITH_INV takes a key away: the completion names it, and it works no more.
pub fn invalidate(run: &Run, ep: &Endpoint) -> Outcome {
    let single = Single::new(ep, &run.tuning(), 16, 1, 0)?;
    let target = ep
        .memory(8192, ALL_ACCESS | verbs::IBV_ACCESS_MW_BIND)
        .or_else(|_| ep.memory(8192, ALL_ACCESS))
        .map_err(|e| e.to_string())?;
    let local = ep.memory(8192, ALL_ACCESS).map_err(|e| e.to_string())?;
    // A memory window where the device has one, otherwise the region itself.
    let mut key = target.rkey;
    let window = ep.pd.alloc_mw(verbs::IBV_MW_TYPE_2);
    let mut kind = "region";
    if let Ok(mw) = &window {
        kind = "window";
        let access = verbs::IBV_ACCESS_REMOTE_WRITE | verbs::IBV_ACCESS_REMOTE_READ;
        key = mw.next_rkey();
        match single.qp.post_bind(5, &Bind { mw, rkey: key, mr: &target, offset: 0, len: 8192, access }) {
            Ok(()) => {
                let wc = single.success(ep, "binding a window")?;
                check!(wc.opcode == verbs::IBV_WC_BIND_MW, "bind: opcode {}", wc.opcode);
            }
            Err(_) => {
                kind = "region";
                key = target.rkey;
            }
        }
    }
    let theirs = ep.oob().exchange(&[u64::from(key), target.addr(0)]).map_err(|e| e.to_string())?;
    let (their_key, their_addr) = (theirs[0] as u32, theirs[1]);
    if !ep.leads {
        single.qp.post_recv(1, &[local.sge(0, 4096)]).map_err(|e| e.to_string())?;
        ep.barrier("ready").map_err(|e| e.to_string())?;
        let wc = single.completion(ep, "the receive")?;
        if wc.status != verbs::IBV_WC_SUCCESS {
            ep.barrier("sent").map_err(|e| e.to_string())?;
            skip!("the device does not invalidate a {kind} of user memory");
        }
        check!(
            wc.wc_flags & verbs::IBV_WC_WITH_INV != 0,
            "wc_flags {:#x} without IBV_WC_WITH_INV",
            wc.wc_flags
        );
        check!(
            verbs::wc_invalidated(&wc) == key,
            "invalidated key {:#x} instead of {key:#x}",
            verbs::wc_invalidated(&wc)
        );
        ep.barrier("sent").map_err(|e| e.to_string())?;
        ep.barrier("refused").map_err(|e| e.to_string())?;
        return Ok(());
    }
    ep.barrier("ready").map_err(|e| e.to_string())?;
    let write = || SendWr {
        sges: vec![local.sge(0, 512)],
        opcode: verbs::IBV_WR_RDMA_WRITE,
        remote_addr: their_addr,
        rkey: their_key,
        ..SendWr::default()
    };
    single.run(ep, "Write before the invalidation", write())?;
    let send = SendWr {
        wr_id: 2,
        sges: vec![local.sge(0, 100)],
        opcode: verbs::IBV_WR_SEND_WITH_INV,
        flags: verbs::IBV_SEND_SIGNALED,
        imm: their_key,
        ..SendWr::default()
    };
    single.qp.post_send(&[send]).map_err(|e| format!("SEND_WITH_INV: {e}"))?;
    let wc = single.completion(ep, "SEND_WITH_INV")?;
    ep.barrier("sent").map_err(|e| e.to_string())?;
    if wc.status != verbs::IBV_WC_SUCCESS {
        skip!("the device does not invalidate a {kind} of user memory ({})", verbs::status_name(wc.status));
    }
    let wr = SendWr { flags: verbs::IBV_SEND_SIGNALED, ..write() };
    single.qp.post_send(&[wr]).map_err(|e| format!("Write after the invalidation: {e}"))?;
    let wc = single.completion(ep, "Write after the invalidation")?;
    check!(
        wc.status == verbs::IBV_WC_REM_ACCESS_ERR,
        "a Write with an invalidated key completed with {}",
        verbs::status_name(wc.status)
    );
    ep.barrier("refused").map_err(|e| e.to_string())?;
    run.note(ep, &format!("a {kind} was invalidated"));
    Ok(())
}

/// Re-registration with other rights takes effect.
pub fn rereg(run: &Run, ep: &Endpoint) -> Outcome {
    let target = ep.memory(8192, ALL_ACCESS).map_err(|e| e.to_string())?;
    let local = ep.memory(8192, ALL_ACCESS).map_err(|e| e.to_string())?;
    let result = target.rereg_access(verbs::IBV_ACCESS_LOCAL_WRITE | verbs::IBV_ACCESS_REMOTE_READ);
    let both = ep.oob().exchange(&[u64::from(result.is_ok())]).map_err(|e| e.to_string())?;
    if let Err(error) = result {
        let code = error.raw_os_error().unwrap_or(0);
        check!(
            code == errno::EOPNOTSUPP || code == errno::EINVAL || code == errno::ENOSYS,
            "rereg_mr: {error}"
        );
        skip!("rereg_mr: {error}");
    }
    if both[0] == 0 {
        skip!("the other end has no rereg_mr");
    }
    let single = Single::new(ep, &run.tuning(), 8, 1, 0)?;
    let (_, rkey) = target.keys();
    let theirs = ep.oob().exchange(&[target.addr(0), u64::from(rkey)]).map_err(|e| e.to_string())?;
    if ep.leads {
        let wr = |opcode| SendWr {
            sges: vec![local.sge(0, 4096)],
            opcode,
            flags: verbs::IBV_SEND_SIGNALED,
            remote_addr: theirs[0],
            rkey: theirs[1] as u32,
            ..SendWr::default()
        };
        single.run(ep, "READ after rereg_mr for reading", wr(verbs::IBV_WR_RDMA_READ))?;
        single.qp.post_send(&[wr(verbs::IBV_WR_RDMA_WRITE)]).map_err(|e| e.to_string())?;
        let wc = single.completion(ep, "Write after rereg_mr for reading")?;
        check!(
            wc.status == verbs::IBV_WC_REM_ACCESS_ERR,
            "a Write after rereg_mr for reading completed with {}",
            verbs::status_name(wc.status)
        );
    }
    ep.barrier("rereg done").map_err(|e| e.to_string())?;
    Ok(())
}
