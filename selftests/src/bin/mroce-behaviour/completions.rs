// SPDX-License-Identifier: GPL-2.0
//! Completions and data: faults, flushes, refusals, receiver-not-ready, sizes.

#![forbid(unsafe_code)]

use crate::Run;
use selftests::dv::Dv;
use selftests::endpoint::{usual_payloads, Endpoint, Remote, Tuning, ALL_ACCESS};
use selftests::ktap::{self, Outcome};
use selftests::single::Single;
use selftests::sys::{busywait, errno, errno_name};
use selftests::verbs::{self, Mr, QpInit, SendWr, Sge, Wc};
use selftests::{check, fail};
use std::sync::Arc;
use std::time::{Duration, Instant};

fn s(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// A signaled request on `len` bytes at offset 0 of `local`.
fn request(opcode: u32, wr_id: u64, local: &Mr, len: usize, addr: u64, rkey: u32) -> SendWr {
    SendWr {
        wr_id,
        sges: if len == 0 { vec![] } else { vec![local.sge(0, len)] },
        opcode,
        flags: verbs::IBV_SEND_SIGNALED,
        remote_addr: addr,
        rkey,
        ..SendWr::default()
    }
}

/// Waits for completion `wr_id` with `status` on the send queue.
fn expect(ep: &Endpoint, single: &Single, what: &str, wr_id: u64, statuses: &[u32]) -> Outcome<Wc> {
    let wc = single.completion(ep, what)?;
    check!(
        wc.wr_id == wr_id,
        "{what}: wr_id {} completed ({}), {wr_id} is due",
        wc.wr_id,
        verbs::status_name(wc.status)
    );
    check!(
        statuses.contains(&wc.status),
        "{what}: {} instead of {}",
        verbs::status_name(wc.status),
        statuses.iter().map(|s| verbs::status_name(*s)).collect::<Vec<_>>().join(" or ")
    );
    Ok(wc)
}

/// Waits for an asynchronous event of QP `qpn`; others are passed over.
pub fn expect_event(ep: &Endpoint, qpn: u32, kind: u32) -> Outcome {
    let end = Instant::now() + ep.wait;
    let mut seen = Vec::new();
    while let Some((k, q)) =
        ep.context.next_event(end.saturating_duration_since(Instant::now())).map_err(s)?
    {
        if k == kind && (q == qpn || qpn == 0) {
            return Ok(());
        }
        seen.push(format!("{} (QP {q:#x})", verbs::event_name(k)));
    }
    fail!("no event '{}' for QP {qpn:#x}; seen: {seen:?}", verbs::event_name(kind))
}

fn expect_state(single: &Single, state: u32, what: &str) -> Outcome {
    let found = single.qp.state().map_err(s)?;
    check!(found == state, "{what}: the QP is in state {found} instead of {state}");
    Ok(())
}

fn no_more(single: &Single, what: &str) -> Outcome {
    let mut wc = [Wc::default()];
    let n = single.qp.send_cq.poll(&mut wc).map_err(s)?;
    check!(
        n == 0,
        "{what}: a completion too many: wr_id {}, {}",
        wc[0].wr_id,
        verbs::status_name(wc[0].status)
    );
    Ok(())
}

struct Memory {
    local: Arc<Mr>,
    target: Arc<Mr>,
    remote: Remote,
}

fn memory(ep: &Endpoint, access: u32) -> Outcome<Memory> {
    let local = ep.memory(8192, ALL_ACCESS).map_err(s)?;
    let target = ep.memory(8192, access).map_err(s)?;
    let remote = *ep.exchange_memory(&[&target]).map_err(s)?.first().ok_or("no key from the other end")?;
    Ok(Memory { local, target, remote })
}

/// Again and again: a good Write, one with a bad key, two more. One error, then flushes; the
/// responder gets its event, its receives are flushed.
pub fn bad_rkey(run: &Run, ep: &Endpoint) -> Outcome {
    let m = memory(ep, ALL_ACCESS)?;
    for round in 0..run.rounds {
        let single = Single::new(ep, &Tuning::default(), 16, 1, 0)?;
        let what = format!("round {round}");
        if !ep.leads {
            single.qp.post_recv(40, &[m.local.sge(0, 64)]).map_err(s)?;
            single.qp.post_recv(41, &[m.local.sge(64, 64)]).map_err(s)?;
        }
        ep.barrier("posted").map_err(s)?;
        if ep.leads {
            m.local.memory.fill(0, 4096, round);
            let write = |id, rkey| request(verbs::IBV_WR_RDMA_WRITE, id, &m.local, 3000, m.remote.addr, rkey);
            let bad = SendWr { flags: 0, ..write(2, m.remote.rkey ^ 0x5a5a_5a00) };
            let list = [
                write(1, m.remote.rkey),
                bad,
                write(3, m.remote.rkey),
                SendWr { flags: 0, ..write(4, m.remote.rkey) },
            ];
            single.qp.post_send(&list).map_err(s)?;
            expect(ep, &single, &what, 1, &[verbs::IBV_WC_SUCCESS])?;
            expect(ep, &single, &what, 2, &[verbs::IBV_WC_REM_ACCESS_ERR])?;
            expect(ep, &single, &what, 3, &[verbs::IBV_WC_WR_FLUSH_ERR])?;
            expect(ep, &single, &what, 4, &[verbs::IBV_WC_WR_FLUSH_ERR])?;
            no_more(&single, &what)?;
            expect_state(&single, verbs::IBV_QPS_ERR, &what)?;
            ep.barrier("failed").map_err(s)?;
        } else {
            ep.barrier("failed").map_err(s)?;
            expect_event(ep, single.qp.number, verbs::IBV_EVENT_QP_ACCESS_ERR)?;
            expect_state(&single, verbs::IBV_QPS_ERR, &what)?;
            expect(ep, &single, &what, 40, &[verbs::IBV_WC_WR_FLUSH_ERR])?;
            expect(ep, &single, &what, 41, &[verbs::IBV_WC_WR_FLUSH_ERR])?;
            no_more(&single, &what)?;
            m.target.memory.verify(0, 3000, round).map_err(|e| format!("{what}: the good Write: {e}"))?;
        }
        ep.barrier("round").map_err(s)?;
    }
    Ok(())
}

/// A request that the responder refuses.
#[derive(Clone, Copy)]
struct Refused<'a> {
    what: &'a str,
    /// Rights of the region.
    rights: u32,
    opcode: u32,
    len: usize,
    /// From the beginning of the region; `i64::MIN`: 41 bytes before the end of all addresses.
    offset: i64,
    /// One of these statuses is the answer.
    allowed: &'a [u32],
}

/// Accesses that the region or the QP does not allow, ranges that leave the region, atomics
/// that are not aligned.
pub fn refused_accesses(_run: &Run, ep: &Endpoint) -> Outcome {
    let access = verbs::IBV_WC_REM_ACCESS_ERR;
    let invalid = verbs::IBV_WC_REM_INV_REQ_ERR;
    let local_only = verbs::IBV_ACCESS_LOCAL_WRITE;
    let write = Refused {
        what: "",
        rights: ALL_ACCESS,
        opcode: verbs::IBV_WR_RDMA_WRITE,
        len: 100,
        offset: 0,
        allowed: &[access],
    };
    let read = Refused { opcode: verbs::IBV_WR_RDMA_READ, ..write };
    let add = Refused { opcode: verbs::IBV_WR_ATOMIC_FETCH_AND_ADD, len: 8, ..write };
    let swap = Refused { opcode: verbs::IBV_WR_ATOMIC_CMP_AND_SWP, ..add };
    let (may_read, may_write) = (verbs::IBV_ACCESS_REMOTE_READ, verbs::IBV_ACCESS_REMOTE_WRITE);
    let steps = [
        Refused { what: "Write without the right", rights: local_only | may_read, ..write },
        Refused { what: "READ without the right", rights: local_only | may_write, ..read },
        Refused { what: "atomic without the right", rights: local_only | may_write, ..add },
        Refused { what: "Write beyond the end", offset: 8192 - 99, ..write },
        Refused { what: "Write before the beginning", offset: -1, ..write },
        Refused { what: "large READ beyond the end", len: 8000, offset: 193, ..read },
        Refused { what: "Write around the end of the address space", offset: i64::MIN, ..write },
        Refused { what: "atomic that is not aligned", offset: 4, allowed: &[invalid, access], ..swap },
    ];
    for Refused { what, rights, opcode, len, offset, allowed } in &steps {
        let atomic =
            *opcode == verbs::IBV_WR_ATOMIC_FETCH_AND_ADD || *opcode == verbs::IBV_WR_ATOMIC_CMP_AND_SWP;
        let both =
            ep.oob().exchange(&[u64::from(ep.device.atomic_cap != verbs::IBV_ATOMIC_NONE)]).map_err(s)?;
        if atomic && (both.first() != Some(&1) || ep.device.atomic_cap == verbs::IBV_ATOMIC_NONE) {
            continue;
        }
        let m = memory(ep, *rights)?;
        m.target.memory.set(0, 8192, 0x33);
        let single = Single::new(ep, &Tuning::default(), 8, 1, 0)?;
        if ep.leads {
            let addr =
                if *offset == i64::MIN { u64::MAX - 40 } else { m.remote.addr.wrapping_add_signed(*offset) };
            let taken = single.qp.post_send(&[request(*opcode, 7, &m.local, *len, addr, m.remote.rkey)]);
            // The requester itself may refuse an atomic that is not aligned.
            let here = taken.is_err() && what.contains("aligned");
            ep.oob().send_words(&[u64::from(here)]).map_err(s)?;
            if !here {
                taken.map_err(|e| format!("{what}: {e}"))?;
                expect(ep, &single, what, 7, allowed)?;
                expect_state(&single, verbs::IBV_QPS_ERR, what)?;
            }
        }
        let here = !ep.leads && ep.oob().recv_words().map_err(s)?.first() == Some(&1);
        ep.barrier("step").map_err(s)?;
        check!(m.target.memory.copy(0, 8192).iter().all(|b| *b == 0x33), "{what}: memory was changed");
        if !ep.leads && !here {
            // An invalid request may be told as such.
            let event = ep.context.next_event(ep.wait).map_err(s)?;
            check!(
                matches!(event, Some((k, q)) if q == single.qp.number && (k == verbs::IBV_EVENT_QP_ACCESS_ERR || k == verbs::IBV_EVENT_QP_REQ_ERR)),
                "{what}: event {event:?} at the responder"
            );
        }
        ep.barrier("next").map_err(s)?;
    }
    // What the QP itself does not allow.
    let m = memory(ep, ALL_ACCESS)?;
    for (what, rights, opcode) in [
        ("Write to a QP without remote write", verbs::IBV_ACCESS_REMOTE_READ, verbs::IBV_WR_RDMA_WRITE),
        ("READ from a QP without remote read", verbs::IBV_ACCESS_REMOTE_WRITE, verbs::IBV_WR_RDMA_READ),
    ] {
        let cq = ep.cq(16).map_err(s)?;
        let qp = ep.pd.create_qp(&QpInit::rc(&cq, &cq, 8, 1, 0)).map_err(s)?;
        qp.init(rights).map_err(s)?;
        ep.connect(&[qp.clone()], &Tuning::default()).map_err(s)?;
        let single = Single { qp };
        if ep.leads {
            single
                .qp
                .post_send(&[request(opcode, 8, &m.local, 64, m.remote.addr, m.remote.rkey)])
                .map_err(s)?;
            expect(ep, &single, what, 8, &[access, invalid])?;
        }
        ep.barrier("step").map_err(s)?;
    }
    Ok(())
}

/// Bad local keys and ranges are the requester's own fault: the peer sees nothing.
pub fn local_faults(_run: &Run, ep: &Endpoint) -> Outcome {
    let m = memory(ep, ALL_ACCESS)?;
    let read_only = ep.memory(4096, 0).map_err(s)?;
    let bad_key = Sge::raw(m.local.addr(0), 64, m.local.lkey ^ 0x1234_5600);
    let too_long = Sge::raw(m.local.addr(8000), 4096, m.local.lkey);
    let unwritable = read_only.sge(0, 64);
    for (what, sge, opcode) in [
        ("Send from a bad lkey", bad_key, verbs::IBV_WR_SEND),
        ("Write from a bad lkey", bad_key, verbs::IBV_WR_RDMA_WRITE),
        ("Write from beyond the region", too_long, verbs::IBV_WR_RDMA_WRITE),
        ("READ into a region without local write", unwritable, verbs::IBV_WR_RDMA_READ),
    ] {
        let single = Single::new(ep, &Tuning::default(), 8, 1, 0)?;
        if ep.leads {
            let good = |id| request(verbs::IBV_WR_RDMA_WRITE, id, &m.local, 16, m.remote.addr, m.remote.rkey);
            let bad = SendWr { sges: vec![sge], opcode, ..good(2) };
            single.qp.post_send(&[good(1), bad, good(3)]).map_err(|e| format!("{what}: {e}"))?;
            expect(ep, &single, what, 1, &[verbs::IBV_WC_SUCCESS])?;
            expect(ep, &single, what, 2, &[verbs::IBV_WC_LOC_PROT_ERR])?;
            expect(ep, &single, what, 3, &[verbs::IBV_WC_WR_FLUSH_ERR])?;
            no_more(&single, what)?;
        }
        ep.barrier("step").map_err(s)?;
    }
    Ok(())
}

/// A Send that is longer than its receive: LOC_LEN_ERR there, REM_INV_REQ_ERR here.
pub fn receive_too_short(_run: &Run, ep: &Endpoint) -> Outcome {
    let m = memory(ep, ALL_ACCESS)?;
    for (len, room) in [(101usize, 100usize), (6000, 5999), (1, 0)] {
        let single = Single::new(ep, &Tuning::default(), 8, 1, 0)?;
        let what = format!("Send of {len} bytes into {room}");
        if !ep.leads {
            let sges = if room == 0 { vec![] } else { vec![m.target.sge(0, room)] };
            m.target.memory.set(0, 8192, 0x44);
            single.qp.post_recv(5, &sges).map_err(s)?;
        }
        ep.barrier("posted").map_err(s)?;
        if ep.leads {
            single.qp.post_send(&[request(verbs::IBV_WR_SEND, 6, &m.local, len, 0, 0)]).map_err(s)?;
            expect(ep, &single, &what, 6, &[verbs::IBV_WC_REM_INV_REQ_ERR])?;
        } else {
            expect(ep, &single, &what, 5, &[verbs::IBV_WC_LOC_LEN_ERR])?;
            check!(
                m.target.memory.copy(room, 8192 - room).iter().all(|b| *b == 0x44),
                "{what}: bytes behind the receive were changed"
            );
        }
        ep.barrier("step").map_err(s)?;
    }
    Ok(())
}

/// Requests and receives posted to a QP in the error state come back flushed, each once.
pub fn post_in_error(_run: &Run, ep: &Endpoint) -> Outcome {
    let m = memory(ep, ALL_ACCESS)?;
    let single = Single::new(ep, &Tuning::default(), 16, 1, 0)?;
    if !ep.leads {
        // Its QP has to be there until the other end is through.
        ep.barrier("through").map_err(s)?;
        return Ok(());
    }
    // Some are outstanding at the change, some come after it.
    for i in 0..4 {
        single.qp.post_recv(100 + i, &[m.local.sge(0, 64)]).map_err(s)?;
    }
    single.qp.set_state(verbs::IBV_QPS_ERR).map_err(s)?;
    for i in 0..4 {
        single.qp.post_recv(104 + i, &[m.local.sge(0, 64)]).map_err(s)?;
        let wr = SendWr {
            flags: 0,
            ..request(verbs::IBV_WR_RDMA_WRITE, 200 + i, &m.local, 64, m.remote.addr, m.remote.rkey)
        };
        single.qp.post_send(&[wr]).map_err(|e| format!("posting to a QP in ERR: {e}"))?;
    }
    let (mut receives, mut sends) = (100, 200);
    for _ in 0..12 {
        let wc = single.completion(ep, "flush")?;
        check!(
            wc.status == verbs::IBV_WC_WR_FLUSH_ERR,
            "wr_id {}: {}",
            wc.wr_id,
            verbs::status_name(wc.status)
        );
        check!(wc.qp_num == single.qp.number, "wr_id {}: QP {:#x}", wc.wr_id, wc.qp_num);
        if wc.wr_id < 200 {
            check!(wc.wr_id == receives, "receive {} is flushed, {receives} is due", wc.wr_id);
            receives += 1;
        } else {
            check!(wc.wr_id == sends, "request {} is flushed, {sends} is due", wc.wr_id);
            sends += 1;
        }
    }
    no_more(&single, "after all flushes")?;
    ep.barrier("through").map_err(s)?;
    Ok(())
}

/// A request fails, and the program has not looked yet: what it posts then comes back flushed,
/// under its own wr_id, behind the failure.
pub fn post_after_unnoticed_error(_run: &Run, ep: &Endpoint) -> Outcome {
    let m = memory(ep, ALL_ACCESS)?;
    let channel = ep.context.create_channel().map_err(s)?;
    let cq = ep.context.create_cq(64, Some(&channel)).map_err(s)?;
    let recv_cq = ep.cq(64).map_err(s)?;
    let qp = ep.qp(&QpInit::rc(&cq, &recv_cq, 16, 1, 0)).map_err(s)?;
    ep.connect(&[qp.clone()], &Tuning::default()).map_err(s)?;
    let single = Single { qp };
    if !ep.leads {
        // Its QP has to be there until the other end is through.
        ep.barrier("through").map_err(s)?;
        m.target.memory.verify(0, 64, 9).map_err(|e| format!("the good Write: {e}"))?;
        return Ok(());
    }
    m.local.memory.fill(0, 64, 9);
    let write = |id, rkey| request(verbs::IBV_WR_RDMA_WRITE, id, &m.local, 64, m.remote.addr, rkey);
    let silent = |id, rkey| SendWr { flags: 0, ..write(id, rkey) };
    single.qp.post_recv(100, &[m.local.sge(64, 64)]).map_err(s)?;
    cq.arm(false).map_err(s)?;
    single.qp.post_send(&[silent(1, m.remote.rkey), silent(2, m.remote.rkey ^ 0x5a5a_5a00)]).map_err(s)?;
    // The event says that there is a completion. Nobody takes it, or asks for the state of the QP.
    check!(channel.wait(ep.wait).map_err(s)?, "no event for the failure");
    m.local.memory.fill(0, 64, 10);
    for i in 0..4 {
        single.qp.post_recv(101 + i, &[m.local.sge(64, 64)]).map_err(s)?;
        // Signaled and not.
        let wr = if i % 2 == 0 { write(3 + i, m.remote.rkey) } else { silent(3 + i, m.remote.rkey) };
        single.qp.post_send(&[wr]).map_err(|e| format!("posting after the failure: {e}"))?;
    }
    expect(ep, &single, "the failure", 2, &[verbs::IBV_WC_REM_ACCESS_ERR])?;
    for id in 3..7 {
        expect(ep, &single, "a request behind it", id, &[verbs::IBV_WC_WR_FLUSH_ERR])?;
    }
    for id in 100..105 {
        let wc = recv_cq.poll_one(ep.wait).map_err(s)?.ok_or("a receive does not come back")?;
        check!(
            wc.wr_id == id && wc.status == verbs::IBV_WC_WR_FLUSH_ERR,
            "receive {} came back with {}, {id} is due",
            wc.wr_id,
            verbs::status_name(wc.status)
        );
    }
    no_more(&single, "after all flushes")?;
    expect_state(&single, verbs::IBV_QPS_ERR, "after all flushes")?;
    ep.barrier("through").map_err(s)?;
    Ok(())
}

/// What post_send and post_recv refuse at once.
pub fn post_refused(_run: &Run, ep: &Endpoint) -> Outcome {
    let m = memory(ep, ALL_ACCESS)?;
    let single = Single::new(ep, &Tuning::default(), 4, 2, 0)?;
    if !ep.leads {
        // Its QP has to be there until the other end is through.
        ep.barrier("through").map_err(s)?;
        return Ok(());
    }
    let qp = &single.qp;
    // The first errno is the one that is due; other drivers have others.
    let due = |what: &str, code: Option<i32>, codes: &[i32]| -> Outcome {
        let codes = if ep.is_metaroce() { &codes[..1] } else { codes };
        check!(
            codes.contains(&code.unwrap_or(0)),
            "{what} instead of {}",
            codes.iter().map(|c| errno_name(*c)).collect::<Vec<_>>().join(" or ")
        );
        Ok(())
    };
    let refused = |what: &str, wr: SendWr, codes: &[i32]| -> Outcome {
        match qp.post_send(&[wr]) {
            Ok(()) => fail!("{what} was taken"),
            Err(e) => due(&format!("{what}: {}", e.error), e.error.raw_os_error(), codes),
        }
    };
    let good = request(verbs::IBV_WR_RDMA_WRITE, 1, &m.local, 64, m.remote.addr, m.remote.rkey);
    let unsupported = [errno::EINVAL, errno::EOPNOTSUPP];
    refused("opcode 0x55", SendWr { opcode: 0x55, ..good.clone() }, &unsupported)?;
    refused("TSO", SendWr { opcode: verbs::IBV_WR_TSO, ..good.clone() }, &unsupported)?;
    let many = SendWr { sges: vec![m.local.sge(0, 8); qp.cap.max_send_sge as usize + 1], ..good.clone() };
    refused("one SGE too many", many, &[errno::EINVAL, errno::ENOMEM])?;
    let atomic =
        SendWr { opcode: verbs::IBV_WR_ATOMIC_FETCH_AND_ADD, sges: vec![m.local.sge(0, 4)], ..good.clone() };
    if ep.is_metaroce() {
        refused("an atomic with a 4-byte buffer", atomic, &[errno::EINVAL])?;
    } else if qp.post_send(&[atomic]).is_ok() {
        // As a fault of this request alone, which is the end of the QP.
        let wc = single.completion(ep, "atomic with a 4-byte buffer")?;
        check!(wc.status != verbs::IBV_WC_SUCCESS, "an atomic with a 4-byte buffer succeeded");
        ep.barrier("through").map_err(s)?;
        return Ok(());
    }
    let room = qp.cap.max_recv_wr;
    for i in 0..room {
        qp.post_recv(u64::from(i), &[m.local.sge(0, 8)])
            .map_err(|e| format!("receive {i} of {room}: {e}"))?;
    }
    match qp.post_recv(99, &[m.local.sge(0, 8)]) {
        Ok(()) => fail!("a receive above max_recv_wr {room} was taken"),
        Err(e) => check!(e.raw_os_error() == Some(errno::ENOMEM), "a receive too many: {e}"),
    }
    let too_many = vec![m.local.sge(0, 8); qp.cap.max_recv_sge as usize + 1];
    let other = ep.qp(&QpInit::rc(&qp.send_cq, &qp.recv_cq, 4, 2, 0)).map_err(s)?;
    let too_many = if too_many.len() > other.cap.max_recv_sge as usize {
        too_many
    } else {
        vec![m.local.sge(0, 8); other.cap.max_recv_sge as usize + 1]
    };
    match other.post_recv(1, &too_many) {
        Ok(()) => fail!("a receive with {} SGEs was taken", too_many.len()),
        Err(e) => due(
            &format!("a receive with too many SGEs: {e}"),
            e.raw_os_error(),
            &[errno::EINVAL, errno::ENOMEM],
        )?,
    }
    if ep.is_metaroce() {
        // One list with a request more than the queue holds: all but the last one are taken.
        let room = qp.cap.max_send_wr as usize;
        let ids = 50..=50 + room as u64;
        let list: Vec<SendWr> = ids.clone().map(|id| SendWr { wr_id: id, ..good.clone() }).collect();
        match qp.post_send(&list) {
            Ok(()) => fail!("{} requests were taken, max_send_wr is {room}", list.len()),
            Err(e) => {
                due(&format!("a request too many: {}", e.error), e.error.raw_os_error(), &[errno::ENOMEM])?;
                check!(e.taken == room, "{} of {room} requests were taken", e.taken);
            }
        }
        for id in ids.take(room) {
            expect(ep, &single, "a request of the full queue", id, &[verbs::IBV_WC_SUCCESS])?;
        }
    }
    // States in which nothing can be sent.
    match other.post_send(&[good.clone()]) {
        Ok(()) => fail!("a request was taken in INIT"),
        Err(e) => check!(e.error.raw_os_error() == Some(errno::EINVAL), "posting in INIT: {}", e.error),
    }
    let fresh = ep.pd.create_qp(&QpInit::rc(&qp.send_cq, &qp.recv_cq, 4, 2, 0)).map_err(s)?;
    match fresh.post_send(&[good.clone()]) {
        Ok(()) => fail!("a request was taken in RESET"),
        Err(e) => check!(e.error.raw_os_error() == Some(errno::EINVAL), "posting in RESET: {}", e.error),
    }
    match fresh.post_recv(1, &[m.local.sge(0, 8)]) {
        Ok(()) => fail!("a receive was taken in RESET"),
        Err(e) => check!(e.raw_os_error() == Some(errno::EINVAL), "posting a receive in RESET: {e}"),
    }
    // After all refusals the QP works.
    qp.post_send(&[good]).map_err(|e| format!("a good request after the refusals: {e}"))?;
    expect(ep, &single, "a good request after the refusals", 1, &[verbs::IBV_WC_SUCCESS])?;
    ep.barrier("through").map_err(s)?;
    Ok(())
}

/// RNR timer codes of the InfiniBand specification, in microseconds.
const RNR_MICROS: [u64; 32] = [
    655_360, 10, 20, 30, 40, 60, 80, 120, 160, 240, 320, 480, 640, 960, 1280, 1920, 2560, 3840, 5120, 7680,
    10_240, 15_360, 20_480, 30_720, 40_960, 61_440, 81_920, 122_880, 163_840, 245_760, 327_680, 491_520,
];

/// Data packets that the device has sent, each time that a request was tried counted by itself;
/// None of a device that does not count so.
fn sent_packets(ep: &Endpoint) -> Outcome<Option<u64>> {
    if !ep.is_metaroce() {
        return Ok(None);
    }
    let [sent] = ep.counters(["sent_pkts"]).map_err(s)?;
    Ok(Some(sent))
}

/// The request is tried again whenever the responder's timer is over, not earlier; once there is a
/// receive, the next time is the last one.
pub fn rnr_timer(_run: &Run, ep: &Endpoint) -> Outcome {
    let m = memory(ep, ALL_ACCESS)?;
    for code in [22u8, 25] {
        let single = Single::new(ep, &Tuning { min_rnr_timer: code, ..Tuning::default() }, 8, 1, 0)?;
        let timer = Duration::from_micros(RNR_MICROS[code as usize]);
        let what = format!("timer code {code} ({} ms)", timer.as_millis());
        ep.barrier("connected").map_err(s)?;
        if ep.leads {
            // The first exchange takes the set-up of the connection out of the measurement.
            single.run(
                ep,
                &what,
                request(verbs::IBV_WR_RDMA_WRITE, 1, &m.local, 8, m.remote.addr, m.remote.rkey),
            )?;
            ep.barrier("go").map_err(s)?;
            let before = sent_packets(ep)?;
            // The request has been sent so often, and refused each time but perhaps the last one.
            let tries = || -> Outcome<Option<u32>> {
                Ok(sent_packets(ep)?.zip(before).map(|(now, before)| (now - before) as u32))
            };
            let in_time = |begin: Instant, tries: u32| -> Outcome {
                let (took, due) = (begin.elapsed(), timer * tries.saturating_sub(1));
                // The two clocks may tick apart.
                check!(took >= due.mul_f64(0.99), "{what}: tried {tries} times within {took:?} already");
                Ok(())
            };
            let begin = Instant::now();
            single.qp.post_send(&[request(verbs::IBV_WR_SEND, 2, &m.local, 100, 0, 0)]).map_err(s)?;
            // It goes on by itself: four times, and no completion.
            let mut early = None;
            let goes_on = busywait(ep.wait, || {
                early = single.qp.send_cq.poll_one(Duration::ZERO).unwrap_or(None);
                let enough = match tries() {
                    Ok(Some(n)) => n >= 4,
                    _ => begin.elapsed() > timer * 4,
                };
                early.is_some() || enough
            });
            check!(early.is_none(), "{what}: a Send without a receive completed");
            check!(goes_on, "{what}: tried only {:?} times in {:?}", tries()?, begin.elapsed());
            if let Some(n) = tries()? {
                in_time(begin, n)?;
            }
            ep.barrier("refused").map_err(s)?;
            ep.barrier("received").map_err(s)?;
            let until_receive = tries()?;
            expect(ep, &single, &what, 2, &[verbs::IBV_WC_SUCCESS])?;
            if let (Some(n), Some(until)) = (tries()?, until_receive) {
                in_time(begin, n)?;
                check!(n <= until + 1, "{what}: tried {} times after the receive was there", n - until);
            }
        } else {
            ep.barrier("go").map_err(s)?;
            ep.barrier("refused").map_err(s)?;
            single.qp.post_recv(3, &[m.target.sge(0, 200)]).map_err(s)?;
            ep.barrier("received").map_err(s)?;
            expect(ep, &single, &what, 3, &[verbs::IBV_WC_SUCCESS])?;
        }
        ep.barrier("step").map_err(s)?;
    }
    Ok(())
}

/// With few RNR retries and no receive the request is tried once more than that and fails, not
/// before the timers are over.
pub fn rnr_exhausted(_run: &Run, ep: &Endpoint) -> Outcome {
    let m = memory(ep, ALL_ACCESS)?;
    let timer = Duration::from_micros(RNR_MICROS[24]);
    for (retries, behind) in [(0u8, false), (0, true), (1, false), (3, false), (3, true), (6, false)] {
        let tuning = Tuning { min_rnr_timer: 24, rnr_retry: retries, ..Tuning::default() };
        let single = Single::new(ep, &tuning, 8, 1, 0)?;
        let what = format!("{retries} RNR retries");
        if ep.leads {
            // The set-up of the connection is no part of it.
            let write = request(verbs::IBV_WR_RDMA_WRITE, 9, &m.local, 8, m.remote.addr, m.remote.rkey);
            single.run(ep, &what, write)?;
            let before = sent_packets(ep)?;
            let begin = Instant::now();
            let send = |id| request(verbs::IBV_WR_SEND, id, &m.local, 100, 0, 0);
            let list: Vec<SendWr> = (1..=1 + u64::from(behind)).map(send).collect();
            single.qp.post_send(&list).map_err(s)?;
            expect(ep, &single, &what, 1, &[verbs::IBV_WC_RNR_RETRY_EXC_ERR])?;
            let took = begin.elapsed();
            if behind {
                expect(ep, &single, &what, 2, &[verbs::IBV_WC_WR_FLUSH_ERR])?;
            }
            check!(
                took >= (timer * u32::from(retries)).mul_f64(0.99),
                "{what}: failed after {took:?} already"
            );
            if let (Some(now), Some(before)) = (sent_packets(ep)?, before) {
                // What is behind it may be sent with it each time, and need not.
                let (tries, due) = (now - before, u64::from(retries) + 1);
                let most = if behind { due * 2 } else { due };
                check!((due..=most).contains(&tries), "{what}: {tries} packets, {due} to {most} are due");
            }
        }
        ep.barrier("step").map_err(s)?;
    }
    Ok(())
}

/// With rnr_retry 7 the request waits as long as it takes.
pub fn rnr_forever(_run: &Run, ep: &Endpoint) -> Outcome {
    let m = memory(ep, ALL_ACCESS)?;
    // 4.096 us << 16 is 0.27 s; the responder's timer is 2.56 ms.
    let tuning = Tuning { min_rnr_timer: 16, timeout: 16, retry_cnt: 1, ..Tuning::default() };
    let without_answer = Duration::from_nanos(4096 << tuning.timeout) * (u32::from(tuning.retry_cnt) + 1);
    let single = Single::new(ep, &tuning, 16, 1, 0)?;
    if ep.leads {
        // Sends, then Writes behind them: nothing overtakes, nothing is lost.
        m.local.memory.fill(0, 6000, 5);
        let list: Vec<SendWr> = (0..4)
            .flat_map(|i| {
                [
                    request(verbs::IBV_WR_SEND, i * 2, &m.local, 1000, 0, 0),
                    request(
                        verbs::IBV_WR_RDMA_WRITE,
                        i * 2 + 1,
                        &m.local,
                        6000,
                        m.remote.addr,
                        m.remote.rkey,
                    ),
                ]
            })
            .collect();
        let before = sent_packets(ep)?;
        let begin = Instant::now();
        single.qp.post_send(&list).map_err(s)?;
        // More often than any number of retries but this one allows (each time at most 12
        // packets), and for longer than a peer may take that does not answer.
        let mut early = None;
        let goes_on = busywait(ep.wait, || {
            early = single.qp.send_cq.poll_one(Duration::ZERO).unwrap_or(None);
            let sent = sent_packets(ep).unwrap_or(None).zip(before).map(|(now, before)| now - before);
            early.is_some() || begin.elapsed() > without_answer && sent.is_none_or(|n| n > 20 * 12)
        });
        check!(goes_on, "the requests were not tried 20 times in {:?}", begin.elapsed());
        check!(
            early.is_none(),
            "a Send without a receive completed: {}",
            early.map_or(String::new(), |wc| verbs::status_name(wc.status))
        );
        ep.barrier("waited").map_err(s)?;
        for i in 0..8 {
            expect(ep, &single, "after the receives", i, &[verbs::IBV_WC_SUCCESS])?;
        }
        ep.barrier("done").map_err(s)?;
    } else {
        ep.barrier("waited").map_err(s)?;
        for i in 0..4 {
            single.qp.post_recv(i, &[m.local.sge(i as usize * 1000, 1000)]).map_err(s)?;
            expect(ep, &single, "receive", i, &[verbs::IBV_WC_SUCCESS])?;
            m.local.memory.verify(i as usize * 1000, 1000, 5).map_err(|e| format!("receive {i}: {e}"))?;
        }
        ep.barrier("done").map_err(s)?;
        m.target.memory.verify(0, 6000, 5).map_err(|e| format!("Write: {e}"))?;
    }
    Ok(())
}

/// The sizes of the bug reports, with Write, READ and Send; one byte above max_msg_sz.
pub fn sizes(_run: &Run, ep: &Endpoint) -> Outcome {
    let single = Single::new(ep, &Tuning::default(), 8, 1, 0)?;
    let local = ep.memory(1 << 18, ALL_ACCESS).map_err(s)?;
    let target = ep.memory(1 << 18, ALL_ACCESS).map_err(s)?;
    let remote = ep.exchange_memory(&[&target]).map_err(s)?[0];
    let mtu = 128usize << ep.port.active_mtu;
    let payload = ep.payload_mtu().map_err(s)?;
    let mut sizes = vec![0, 1, 1023, 1024, 1025, 4095, 4096, 4097, 65535, 65536, 65537];
    for packets in [1, 2, 3, 16, 33] {
        // Around the MTU of the port, and around what packets carry on this link and on others.
        for payload in [mtu, payload].into_iter().chain(usual_payloads()) {
            sizes.extend([packets * payload - 1, packets * payload, packets * payload + 1]);
        }
    }
    let common = ep.oob().exchange(&[mtu as u64]).map_err(s)?;
    check!(common.first() == Some(&(mtu as u64)), "the ends have different MTUs: {mtu} and {common:?}");
    sizes.retain(|len| *len <= 1 << 18);
    sizes.sort_unstable();
    sizes.dedup();
    let count = sizes.len();
    for (n, len) in sizes.into_iter().enumerate() {
        let seed = n as u64 + 1000;
        for opcode in [verbs::IBV_WR_RDMA_WRITE, verbs::IBV_WR_SEND, verbs::IBV_WR_RDMA_READ] {
            let what = format!("opcode {opcode}, {len} bytes");
            if ep.leads {
                local.memory.fill(0, len, seed);
                ep.barrier("ready").map_err(s)?;
                if opcode == verbs::IBV_WR_RDMA_READ {
                    local.memory.set(0, len, 0);
                }
                single.run(ep, &what, request(opcode, 1, &local, len, remote.addr, remote.rkey))?;
                local.memory.verify(0, len, seed).map_err(|e| format!("{what}: {e}"))?;
                ep.barrier("moved").map_err(s)?;
            } else {
                if opcode == verbs::IBV_WR_SEND {
                    target.memory.set(0, len, 0);
                    let sges = if len == 0 { vec![] } else { vec![target.sge(0, len)] };
                    single.qp.post_recv(2, &sges).map_err(s)?;
                }
                ep.barrier("ready").map_err(s)?;
                if opcode == verbs::IBV_WR_SEND {
                    let wc = single.success(ep, &what)?;
                    check!(wc.byte_len as usize == len, "{what}: byte_len {}", wc.byte_len);
                }
                ep.barrier("moved").map_err(s)?;
                target.memory.verify(0, len, seed).map_err(|e| format!("{what}: {e}"))?;
            }
        }
    }
    if ep.is_metaroce() {
        // The sizes were around what the packets really carried.
        let (connection, _) = Dv::load().and_then(|dv| dv.paths(&single.qp)).map_err(s)?;
        let found = connection.payload_mtu as usize;
        check!(found == payload, "full packets carry {found} bytes, {payload} are due");
    }
    if ep.leads {
        ktap::note(&format!("{count} sizes, {payload} bytes in a full packet"));
    }
    if ep.leads && ep.port.max_msg_sz < u32::MAX {
        let sge = Sge::raw(local.addr(0), ep.port.max_msg_sz + 1, local.lkey);
        let wr = SendWr {
            sges: vec![sge],
            ..request(verbs::IBV_WR_RDMA_WRITE, 1, &local, 8, remote.addr, remote.rkey)
        };
        match single.qp.post_send(&[wr]) {
            Ok(()) => fail!("max_msg_sz + 1 was taken"),
            Err(e) => check!(e.error.raw_os_error() == Some(errno::EINVAL), "max_msg_sz + 1: {}", e.error),
        }
    }
    Ok(())
}

/// Writes with immediate data, signaled and not, with several SGEs, empty, inline up to the
/// advertised maximum; one byte more is refused.
pub fn write_with_immediate(_run: &Run, ep: &Endpoint) -> Outcome {
    let m = memory(ep, ALL_ACCESS)?;
    let wish =
        if ep.pd.create_qp(&QpInit::rc(&ep.cq(16).map_err(s)?, &ep.cq(16).map_err(s)?, 16, 3, 236)).is_ok() {
            236
        } else {
            0
        };
    let single = Single::new(ep, &Tuning::default(), 16, 3, wish)?;
    let inline = single.qp.cap.max_inline_data as usize;
    let common = ep.oob().exchange(&[inline as u64]).map_err(s)?[0] as usize;
    check!(inline == common, "the ends take {inline} and {common} bytes of inline data");
    // (bytes, signaled, inline)
    let steps = [
        (0, true, false),
        (1, false, false),
        (5000, true, false),
        (5000, false, false),
        (inline, true, true),
        (inline, false, true),
        (64, true, false),
    ];
    if !ep.leads {
        for i in 0..steps.len() as u64 {
            single.qp.post_recv(i, &[]).map_err(s)?;
        }
    }
    ep.barrier("ready").map_err(s)?;
    for (i, (len, signaled, inline)) in steps.into_iter().enumerate() {
        let what = format!("step {i}: {len} bytes, signaled {signaled}, inline {inline}");
        let seed = 70 + i as u64;
        if ep.leads {
            m.local.memory.fill(0, len, seed);
            let third = len / 3;
            let sges = match len {
                0 => vec![],
                1 => vec![m.local.sge(0, 1)],
                _ => vec![
                    m.local.sge(0, third),
                    m.local.sge(third, third),
                    m.local.sge(2 * third, len - 2 * third),
                ],
            };
            let flags = if signaled { verbs::IBV_SEND_SIGNALED } else { 0 }
                | if inline { verbs::IBV_SEND_INLINE } else { 0 };
            let wr = SendWr {
                wr_id: i as u64,
                sges,
                flags,
                imm: 0xabcd_0000 + i as u32,
                ..request(
                    verbs::IBV_WR_RDMA_WRITE_WITH_IMM,
                    0,
                    &m.local,
                    0,
                    m.remote.addr + 100,
                    m.remote.rkey,
                )
            };
            single.qp.post_send(&[wr]).map_err(|e| format!("{what}: {e}"))?;
            if signaled {
                // The unsignaled ones before it are silent.
                expect(ep, &single, &what, i as u64, &[verbs::IBV_WC_SUCCESS])?;
            }
        } else {
            let wc = expect(ep, &single, &what, i as u64, &[verbs::IBV_WC_SUCCESS])?;
            check!(wc.opcode == verbs::IBV_WC_RECV_RDMA_WITH_IMM, "{what}: opcode {}", wc.opcode);
            check!(
                verbs::wc_imm(&wc) == 0xabcd_0000 + i as u32,
                "{what}: immediate {:#x}",
                verbs::wc_imm(&wc)
            );
            check!(wc.byte_len as usize == len, "{what}: byte_len {}", wc.byte_len);
            m.target.memory.verify(100, len, seed).map_err(|e| format!("{what}: {e}"))?;
        }
        ep.barrier("step").map_err(s)?;
    }
    no_more(&single, "after all steps")?;
    if ep.leads {
        let wr = SendWr {
            flags: verbs::IBV_SEND_SIGNALED | verbs::IBV_SEND_INLINE,
            ..request(
                verbs::IBV_WR_RDMA_WRITE_WITH_IMM,
                9,
                &m.local,
                inline + 1,
                m.remote.addr,
                m.remote.rkey,
            )
        };
        match single.qp.post_send(&[wr]) {
            Ok(()) => fail!("{} bytes of inline data were taken, the maximum is {inline}", inline + 1),
            Err(e) => {
                let code = e.error.raw_os_error().unwrap_or(0);
                check!(
                    code == errno::EINVAL || code == errno::ENOMEM,
                    "inline data above the maximum: {}",
                    errno_name(code)
                );
            }
        }
    }
    ep.barrier("refused").map_err(s)?;
    Ok(())
}

/// A CQ that overflows says so, and its QP does not go on as if nothing had been lost.
pub fn cq_overflow(_run: &Run, ep: &Endpoint) -> Outcome {
    let m = memory(ep, ALL_ACCESS)?;
    let cq = ep.cq(2).map_err(s)?;
    let entries = cq.entries();
    let depth = entries + 40;
    let qp = ep.qp(&QpInit::rc(&cq, &cq, depth, 1, 0)).map_err(s)?;
    ep.connect(&[qp.clone()], &Tuning::default()).map_err(s)?;
    if !ep.leads {
        // Its QP has to be there until the other end is through.
        ep.barrier("through").map_err(s)?;
        return Ok(());
    }
    for i in 0..u64::from(depth) {
        if qp
            .post_send(&[request(verbs::IBV_WR_RDMA_WRITE, i, &m.local, 8, m.remote.addr, m.remote.rkey)])
            .is_err()
        {
            // The overflow came while posting.
            break;
        }
    }
    let end = Instant::now() + ep.wait;
    let mut seen = Vec::new();
    loop {
        match ep.context.next_event(end.saturating_duration_since(Instant::now())).map_err(s)? {
            Some((kind, _)) if kind == verbs::IBV_EVENT_CQ_ERR => break,
            Some((kind, _)) => seen.push(verbs::event_name(kind)),
            None => {
                fail!("a CQ of {entries} entries took {depth} completions without an event; seen: {seen:?}")
            }
        }
    }
    // Whatever is still in the CQ is in order.
    let mut wcs = vec![Wc::default(); depth as usize];
    if let Ok(n) = cq.poll(&mut wcs) {
        for (i, wc) in wcs[..n].iter().enumerate() {
            check!(wc.wr_id == i as u64, "entry {i} of the overflown CQ has wr_id {}", wc.wr_id);
        }
    }
    ep.barrier("through").map_err(s)?;
    Ok(())
}

/// A peer that does not answer: RETRY_EXC_ERR, not before the retries are over, then flushes.
pub fn retries_exhausted(_run: &Run, ep: &Endpoint) -> Outcome {
    let m = memory(ep, ALL_ACCESS)?;
    // 4.096 us << 13 is 33.6 ms.
    let single = Single::new(ep, &Tuning { timeout: 13, retry_cnt: 2, ..Tuning::default() }, 8, 1, 0)?;
    if !ep.leads {
        drop(single);
        ep.barrier("destroyed").map_err(s)?;
        ep.barrier("failed").map_err(s)?;
        return Ok(());
    }
    ep.barrier("destroyed").map_err(s)?;
    let begin = Instant::now();
    let write = |id| request(verbs::IBV_WR_RDMA_WRITE, id, &m.local, 100, m.remote.addr, m.remote.rkey);
    single.qp.post_send(&[write(1), write(2)]).map_err(s)?;
    expect(ep, &single, "Write to a QP that is gone", 1, &[verbs::IBV_WC_RETRY_EXC_ERR])?;
    expect(ep, &single, "the Write behind it", 2, &[verbs::IBV_WC_WR_FLUSH_ERR])?;
    let took = begin.elapsed();
    check!(took > Duration::from_millis(100), "the retries were over after {took:?}");
    expect_state(&single, verbs::IBV_QPS_ERR, "after the last retry")?;
    ep.barrier("failed").map_err(s)?;
    Ok(())
}
