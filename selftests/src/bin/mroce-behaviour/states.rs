// SPDX-License-Identifier: GPL-2.0
//! The states of a QP: every transition, what each needs, what it does to the work in flight.

#![forbid(unsafe_code)]

use crate::completions::expect_event;
use crate::Run;
use selftests::endpoint::{Endpoint, Tuning, ALL_ACCESS};
use selftests::ktap::Outcome;
use selftests::single::Single;
use selftests::sys::{errno, errno_name};
use selftests::verbs::{self, Connect, Qp, QpAttr, QpInit, SendWr, Wc};
use selftests::{check, fail, skip};
use std::sync::Arc;
use std::time::Duration;

fn s(error: impl std::fmt::Display) -> String {
    error.to_string()
}

fn fresh(ep: &Endpoint) -> Outcome<Arc<Qp>> {
    let cq = ep.cq(16).map_err(s)?;
    Ok(ep.pd.create_qp(&QpInit::rc(&cq, &cq, 8, 1, 0)).map_err(s)?)
}

/// A connection to nobody in particular, good enough for transitions.
fn nobody(ep: &Endpoint) -> Connect {
    Connect {
        qpn: 0x11_1111,
        gid: ep.gid,
        gid_index: ep.gid_index,
        rq_psn: 1,
        sq_psn: 2,
        mtu: ep.port.active_mtu,
        rd_atomic: 1,
        dest_rd_atomic: 1,
        timeout: 14,
        retry_cnt: 1,
        rnr_retry: 1,
        min_rnr_timer: 12,
        traffic_class: 0,
    }
}

fn init_attr() -> (QpAttr, u32) {
    let attr = QpAttr {
        qp_state: verbs::IBV_QPS_INIT,
        pkey_index: 0,
        port_num: 1,
        qp_access_flags: ALL_ACCESS,
        ..QpAttr::default()
    };
    (attr, verbs::IBV_QP_STATE | verbs::IBV_QP_PKEY_INDEX | verbs::IBV_QP_PORT | verbs::IBV_QP_ACCESS_FLAGS)
}

/// Brings a QP from RESET into `state`.
fn bring(ep: &Endpoint, qp: &Qp, state: u32) -> Outcome {
    let c = nobody(ep);
    let name = state_name(state);
    if state == verbs::IBV_QPS_RESET {
        return Ok(());
    }
    qp.init(ALL_ACCESS).map_err(|e| format!("on the way to {name}: INIT: {e}"))?;
    if state == verbs::IBV_QPS_ERR {
        qp.set_state(state).map_err(|e| format!("INIT to ERR: {e}"))?;
        return Ok(());
    }
    if state == verbs::IBV_QPS_INIT {
        return Ok(());
    }
    qp.to_rtr(&c).map_err(|e| format!("on the way to {name}: RTR: {e}"))?;
    if state == verbs::IBV_QPS_RTR {
        return Ok(());
    }
    qp.to_rts(&c).map_err(|e| format!("on the way to {name}: RTS: {e}"))?;
    if state == verbs::IBV_QPS_SQD {
        qp.set_state(state).map_err(|e| format!("RTS to SQD: {e}"))?;
    }
    Ok(())
}

fn state_name(state: u32) -> &'static str {
    match state {
        verbs::IBV_QPS_RESET => "RESET",
        verbs::IBV_QPS_INIT => "INIT",
        verbs::IBV_QPS_RTR => "RTR",
        verbs::IBV_QPS_RTS => "RTS",
        verbs::IBV_QPS_SQD => "SQD",
        verbs::IBV_QPS_SQE => "SQE",
        verbs::IBV_QPS_ERR => "ERR",
        _ => "?",
    }
}

/// Every pair of states of an RC QP: the allowed ones work, the others give EINVAL and change nothing.
pub fn transitions(_run: &Run, ep: &Endpoint) -> Outcome {
    if !ep.leads {
        return Ok(());
    }
    let (reset, init, rtr, rts, sqd, sqe, err) = (
        verbs::IBV_QPS_RESET,
        verbs::IBV_QPS_INIT,
        verbs::IBV_QPS_RTR,
        verbs::IBV_QPS_RTS,
        verbs::IBV_QPS_SQD,
        verbs::IBV_QPS_SQE,
        verbs::IBV_QPS_ERR,
    );
    let c = nobody(ep);
    let mut wrong = Vec::new();
    for from in [reset, init, rtr, rts, sqd, err] {
        for to in [reset, init, rtr, rts, sqd, sqe, err] {
            // The kernel's own table has no way from RESET to ERR.
            let allowed = to == reset
                || to == err && from != reset
                || matches!((from, to), (f, t) if f == reset && t == init
                    || f == init && (t == init || t == rtr)
                    || f == rtr && t == rts
                    || f == rts && (t == rts || t == sqd)
                    || f == sqd && (t == sqd || t == rts));
            let qp = fresh(ep)?;
            bring(ep, &qp, from)?;
            let (attr, mask) = match to {
                t if t == init => init_attr(),
                t if t == rtr => Qp::rtr_attr(&c),
                // From RTS and SQD all else is optional.
                t if t == rts && from == rtr => Qp::rts_attr(&c),
                t => (QpAttr { qp_state: t, ..QpAttr::default() }, verbs::IBV_QP_STATE),
            };
            let result = qp.modify(&attr, mask);
            let after = qp.state().map_err(s)?;
            let step = format!("{} to {}", state_name(from), state_name(to));
            match (allowed, result) {
                (true, Ok(())) if after == to => {}
                (true, Ok(())) => wrong.push(format!("{step}: query_qp says {}", state_name(after))),
                (true, Err(e)) => wrong.push(format!("{step}: {e}")),
                (false, Ok(())) => wrong.push(format!("{step}: was allowed")),
                (false, Err(e)) => {
                    let code = e.raw_os_error().unwrap_or(0);
                    if code != errno::EINVAL {
                        wrong.push(format!("{step}: {} instead of EINVAL", errno_name(code)));
                    }
                    if after != from {
                        wrong.push(format!("{step}: refused, but the state is {}", state_name(after)));
                    }
                }
            }
        }
    }
    // The walk of the bug reports.
    let qp = fresh(ep)?;
    for state in [reset, reset] {
        qp.set_state(state).map_err(|e| format!("RESET to RESET: {e}"))?;
    }
    qp.init(ALL_ACCESS).map_err(|e| format!("RESET, RESET, INIT: {e}"))?;
    check!(wrong.is_empty(), "{}", wrong.join("\n"));
    Ok(())
}

/// Each transition with each of its required attributes left out: EINVAL.
pub fn missing_attributes(_run: &Run, ep: &Endpoint) -> Outcome {
    if !ep.leads {
        return Ok(());
    }
    let c = nobody(ep);
    let mut wrong = Vec::new();
    for (from, (attr, mask)) in [
        (verbs::IBV_QPS_RESET, init_attr()),
        (verbs::IBV_QPS_INIT, Qp::rtr_attr(&c)),
        (verbs::IBV_QPS_RTR, Qp::rts_attr(&c)),
    ] {
        for bit in (0..32).map(|b| 1u32 << b).filter(|b| mask & b != 0 && *b != verbs::IBV_QP_STATE) {
            let qp = fresh(ep)?;
            bring(ep, &qp, from)?;
            let step =
                format!("{} to {} without attribute {bit:#x}", state_name(from), state_name(attr.qp_state));
            match qp.modify(&attr, mask & !bit) {
                Ok(()) => wrong.push(format!("{step}: was allowed")),
                Err(e) if e.raw_os_error() == Some(errno::EINVAL) => {}
                Err(e) => wrong.push(format!("{step}: {e}")),
            }
            // With all of them it works.
            if let Err(e) = qp.modify(&attr, mask) {
                wrong.push(format!("{step}, then complete: {e}"));
            }
        }
        // An attribute that has no business there.
        let qp = fresh(ep)?;
        bring(ep, &qp, from)?;
        match qp.modify(&attr, mask | verbs::IBV_QP_QKEY) {
            Ok(()) => wrong.push(format!("{} with a Q_Key: was allowed", state_name(attr.qp_state))),
            Err(e) if e.raw_os_error() == Some(errno::EINVAL) => {}
            Err(e) => wrong.push(format!("{} with a Q_Key: {e}", state_name(attr.qp_state))),
        }
    }
    check!(wrong.is_empty(), "{}", wrong.join("\n"));
    Ok(())
}

/// Values out of range: EINVAL.
pub fn bad_values(_run: &Run, ep: &Endpoint) -> Outcome {
    if !ep.leads {
        return Ok(());
    }
    let mut wrong = Vec::new();
    type Change = fn(&mut QpAttr);
    let init: &[(&str, Change)] = &[
        ("port 0", |a| a.port_num = 0),
        ("port 2", |a| a.port_num = 2),
        ("P_Key index 1000", |a| a.pkey_index = 1000),
    ];
    let rtr: &[(&str, Change)] = &[
        ("GID index 254", |a| a.ah_attr.grh.sgid_index = 254),
        ("no GRH", |a| a.ah_attr.is_global = 0),
        ("path MTU 0", |a| a.path_mtu = 0),
        ("path MTU 6", |a| a.path_mtu = 6),
        ("min_rnr_timer 32", |a| a.min_rnr_timer = 32),
        ("max_dest_rd_atomic 255", |a| a.max_dest_rd_atomic = 255),
        ("port 2 in the address", |a| a.ah_attr.port_num = 2),
    ];
    let rts: &[(&str, Change)] = &[
        ("timeout 32", |a| a.timeout = 32),
        ("retry_cnt 8", |a| a.retry_cnt = 8),
        ("rnr_retry 8", |a| a.rnr_retry = 8),
        ("max_rd_atomic 255", |a| a.max_rd_atomic = 255),
    ];
    let c = nobody(ep);
    for (from, (attr, mask), changes) in [
        (verbs::IBV_QPS_RESET, init_attr(), init),
        (verbs::IBV_QPS_INIT, Qp::rtr_attr(&c), rtr),
        (verbs::IBV_QPS_RTR, Qp::rts_attr(&c), rts),
    ] {
        for (name, change) in changes {
            let qp = fresh(ep)?;
            bring(ep, &qp, from)?;
            let mut bad = attr;
            change(&mut bad);
            match qp.modify(&bad, mask) {
                Ok(()) => wrong.push(format!("{name}: was allowed")),
                Err(e) if e.raw_os_error() == Some(errno::EINVAL) => {}
                // What the core says before the driver sees the request.
                Err(e) if name.starts_with("GID") && e.raw_os_error() == Some(errno::ENODATA) => {}
                Err(e) => wrong.push(format!("{name}: {e}")),
            }
            if qp.state().map_err(s)? != from {
                wrong.push(format!("{name}: the state changed"));
            }
        }
    }
    check!(wrong.is_empty(), "{}", wrong.join("\n"));
    Ok(())
}

/// query_qp gives back what modify_qp was told.
pub fn query_gives_back(_run: &Run, ep: &Endpoint) -> Outcome {
    if !ep.leads {
        return Ok(());
    }
    let qp = fresh(ep)?;
    let c = Connect {
        timeout: 17,
        retry_cnt: 5,
        rnr_retry: 6,
        min_rnr_timer: 21,
        rq_psn: 0x12_3456,
        sq_psn: 0x65_4321,
        traffic_class: 0x28,
        ..nobody(ep)
    };
    qp.init(verbs::IBV_ACCESS_REMOTE_READ).map_err(s)?;
    qp.to_rtr(&c).map_err(s)?;
    qp.to_rts(&c).map_err(s)?;
    let (a, cap) = qp
        .query(u32::MAX >> 8)
        .or_else(|_| qp.query(verbs::IBV_QP_STATE | verbs::IBV_QP_AV | verbs::IBV_QP_CAP))
        .map_err(s)?;
    let mut wrong = Vec::new();
    let mut same = |name: &str, found: u64, told: u64| {
        if found != told {
            wrong.push(format!("{name} is {found:#x} instead of {told:#x}"));
        }
    };
    same("state", u64::from(a.qp_state), u64::from(verbs::IBV_QPS_RTS));
    same("path_mtu", u64::from(a.path_mtu), u64::from(c.mtu));
    same("dest_qp_num", u64::from(a.dest_qp_num), u64::from(c.qpn));
    same("rq_psn", u64::from(a.rq_psn), u64::from(c.rq_psn));
    same("sq_psn", u64::from(a.sq_psn), u64::from(c.sq_psn));
    same("access flags", u64::from(a.qp_access_flags & 0xf), u64::from(verbs::IBV_ACCESS_REMOTE_READ));
    same("timeout", u64::from(a.timeout), 17);
    same("retry_cnt", u64::from(a.retry_cnt), 5);
    same("rnr_retry", u64::from(a.rnr_retry), 6);
    same("min_rnr_timer", u64::from(a.min_rnr_timer), 21);
    same("max_rd_atomic", u64::from(a.max_rd_atomic), 1);
    same("max_dest_rd_atomic", u64::from(a.max_dest_rd_atomic), 1);
    same("port_num", u64::from(a.port_num), 1);
    same("sgid_index", u64::from(a.ah_attr.grh.sgid_index), u64::from(ep.gid_index));
    same("traffic_class", u64::from(a.ah_attr.grh.traffic_class), 0x28);
    same("max_send_wr at least", u64::from(cap.max_send_wr.min(8)), 8);
    check!(wrong.is_empty(), "{}", wrong.join("\n"));
    Ok(())
}

/// The same two QPs through RESET and a new connection, again and again, with traffic; work in
/// flight at RESET leaves no completion behind.
pub fn reset_and_reconnect(run: &Run, ep: &Endpoint) -> Outcome {
    let cq = ep.cq(64).map_err(s)?;
    let qp = ep.pd.create_qp(&QpInit::rc(&cq, &cq, 16, 1, 0)).map_err(s)?;
    let mr = ep.memory(65536, ALL_ACCESS).map_err(s)?;
    let remote = ep.exchange_memory(&[&mr]).map_err(s)?[0];
    let single = Single { qp: qp.clone() };
    for round in 0..run.rounds {
        qp.init(ALL_ACCESS).map_err(|e| format!("round {round}: INIT: {e}"))?;
        ep.connect(&[qp.clone()], &Tuning::default()).map_err(|e| format!("round {round}: {e}"))?;
        let write = |id: u64, len: usize| SendWr {
            wr_id: id,
            sges: vec![mr.sge(0, len)],
            opcode: verbs::IBV_WR_RDMA_WRITE,
            flags: verbs::IBV_SEND_SIGNALED,
            remote_addr: remote.addr + 32768,
            rkey: remote.rkey,
            ..SendWr::default()
        };
        mr.memory.fill(0, 3000, round * 2 + u64::from(ep.leads));
        single.run(ep, &format!("round {round}"), write(0, 3000))?;
        ep.barrier("written").map_err(s)?;
        mr.memory
            .verify(32768, 3000, round * 2 + u64::from(!ep.leads))
            .map_err(|e| format!("round {round}: {e}"))?;
        ep.barrier("checked").map_err(s)?;
        // Some in flight.
        for i in 0..8 {
            qp.post_send(&[write(100 + i, 30_000)]).map_err(s)?;
        }
        qp.set_state(verbs::IBV_QPS_RESET).map_err(|e| format!("round {round}: RESET: {e}"))?;
        let mut wc = [Wc::default()];
        check!(
            cq.poll(&mut wc).map_err(s)? == 0,
            "round {round}: after RESET the CQ still holds wr_id {}",
            wc[0].wr_id
        );
        ep.barrier("reset").map_err(s)?;
    }
    Ok(())
}

/// SQD: what was posted before runs to its end, the event says so, what comes after waits for RTS.
pub fn drain(_run: &Run, ep: &Endpoint) -> Outcome {
    let single = Single::new(ep, &Tuning::default(), 32, 1, 0)?;
    let mr = ep.memory(1 << 20, ALL_ACCESS).map_err(s)?;
    let remote = ep.exchange_memory(&[&mr]).map_err(s)?[0];
    if !ep.leads {
        // Its QP has to be there until the other end is through.
        ep.barrier("through").map_err(s)?;
        return Ok(());
    }
    let qp = &single.qp;
    let write = |id: u64| SendWr {
        wr_id: id,
        sges: vec![mr.sge(0, 100_000)],
        opcode: verbs::IBV_WR_RDMA_WRITE,
        flags: verbs::IBV_SEND_SIGNALED,
        remote_addr: remote.addr + 500_000,
        rkey: remote.rkey,
        ..SendWr::default()
    };
    let list: Vec<SendWr> = (0..8).map(write).collect();
    qp.post_send(&list).map_err(s)?;
    let attr = QpAttr { qp_state: verbs::IBV_QPS_SQD, en_sqd_async_notify: 1, ..QpAttr::default() };
    if let Err(e) = qp.modify(&attr, verbs::IBV_QP_STATE | verbs::IBV_QP_EN_SQD_ASYNC_NOTIFY) {
        check!(e.raw_os_error() == Some(errno::EOPNOTSUPP), "RTS to SQD: {e}");
        skip!("no SQD");
    }
    expect_event(ep, qp.number, verbs::IBV_EVENT_SQ_DRAINED)?;
    // A request that had begun is done; one that had not may wait for RTS.
    let mut next = 0;
    let mut wc = [Wc::default()];
    while qp.send_cq.poll(&mut wc).map_err(s)? == 1 {
        check!(
            wc[0].status == verbs::IBV_WC_SUCCESS && wc[0].wr_id == next,
            "in SQD: wr_id {}, {}",
            wc[0].wr_id,
            verbs::status_name(wc[0].status)
        );
        next += 1;
    }
    qp.post_send(&[write(8)]).map_err(|e| format!("posting in SQD: {e}"))?;
    let early = qp.send_cq.poll_one(Duration::from_millis(200)).map_err(s)?;
    check!(
        early.is_none(),
        "wr_id {:?} completed in SQD, after the queue had drained",
        early.map(|wc| wc.wr_id)
    );
    qp.set_state(verbs::IBV_QPS_RTS).map_err(|e| format!("SQD to RTS: {e}"))?;
    while next <= 8 {
        let wc = single.success(ep, "after RTS")?;
        check!(wc.wr_id == next, "after RTS: wr_id {} instead of {next}", wc.wr_id);
        next += 1;
    }
    ep.barrier("through").map_err(s)?;
    Ok(())
}

/// One end is in RTS and sends before the other end is in RTR: nothing is lost.
pub fn either_order(_run: &Run, ep: &Endpoint) -> Outcome {
    for leader_first in [true, false] {
        let qp = fresh(ep)?;
        qp.init(ALL_ACCESS).map_err(s)?;
        let mr = ep.memory(65536, ALL_ACCESS).map_err(s)?;
        let remote = ep.exchange_memory(&[&mr]).map_err(s)?[0];
        let plan = ep.plan(&[qp.clone()], &Tuning::default()).map_err(s)?;
        let connect = plan.first().ok_or("no plan")?;
        let single = Single { qp: qp.clone() };
        if leader_first == ep.leads {
            qp.to_rtr(connect).map_err(s)?;
            qp.to_rts(connect).map_err(s)?;
            mr.memory.fill(0, 20_000, 3);
            let wr = |id, opcode| SendWr {
                wr_id: id,
                sges: vec![mr.sge(0, 20_000)],
                opcode,
                flags: verbs::IBV_SEND_SIGNALED,
                remote_addr: remote.addr + 40_000,
                rkey: remote.rkey,
                ..SendWr::default()
            };
            qp.post_send(&[wr(1, verbs::IBV_WR_RDMA_WRITE), wr(2, verbs::IBV_WR_SEND)]).map_err(s)?;
            let early = qp.send_cq.poll_one(Duration::from_millis(150)).map_err(s)?;
            if let Some(wc) = early {
                fail!("a request to a QP that is not in RTR completed: {}", verbs::status_name(wc.status));
            }
            ep.barrier("sent").map_err(s)?;
            for id in [1, 2] {
                let wc = single.success(ep, "after the other end came up")?;
                check!(wc.wr_id == id, "wr_id {} instead of {id}", wc.wr_id);
            }
        } else {
            ep.barrier("sent").map_err(s)?;
            qp.post_recv(9, &[mr.sge(0, 20_000)]).map_err(s)?;
            qp.to_rtr(connect).map_err(s)?;
            single.success(ep, "the receive")?;
            mr.memory.verify(40_000, 20_000, 3).map_err(|e| format!("Write: {e}"))?;
            mr.memory.verify(0, 20_000, 3).map_err(|e| format!("Send: {e}"))?;
            qp.to_rts(connect).map_err(s)?;
        }
        ep.barrier("done").map_err(s)?;
    }
    Ok(())
}
