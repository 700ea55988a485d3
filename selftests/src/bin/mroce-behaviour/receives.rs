// SPDX-License-Identifier: GPL-2.0
//! Receives: how many may be outstanding.

#![forbid(unsafe_code)]

use crate::Run;
use selftests::endpoint::{Endpoint, Tuning, ALL_ACCESS};
use selftests::ktap::Outcome;
use selftests::sys::errno;
use selftests::verbs::{self, Cq, Mr, Qp, QpInit, SendWr, Srq, Wc};
use selftests::{check, fail, skip};
use std::sync::Arc;
use std::time::Duration;

fn s(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// Bytes of an SGE.
const PIECE: usize = 8 << 20;
/// SGEs of a receive: one is as long as a few tenths of a second of traffic.
const PIECES: u32 = 16;

/// Two QPs that take their receives from the same queue, or of which the first has one.
struct Bench {
    what: &'static str,
    srq: Option<Arc<Srq>>,
    cq: Arc<Cq>,
    qps: Vec<Arc<Qp>>,
    mr: Arc<Mr>,
}

impl Bench {
    fn new(ep: &Endpoint, shared: bool) -> Outcome<Self> {
        let srq = if shared { Some(ep.pd.create_srq(16, PIECES).map_err(s)?) } else { None };
        let cq = ep.cq(64).map_err(s)?;
        let mut qps = Vec::new();
        for _ in 0..2 {
            let mut init = QpInit::rc(&cq, &cq, 16, PIECES, 0);
            init.srq = srq.clone();
            qps.push(ep.qp(&init).map_err(s)?);
        }
        let mr = ep.memory(PIECE, ALL_ACCESS).map_err(s)?;
        Ok(Bench { what: if shared { "SRQ" } else { "own queue" }, srq, cq, qps, mr })
    }

    /// Posts receives until the queue is full; their number.
    fn fill(&self) -> Outcome<u32> {
        let sges = vec![self.mr.sge(0, PIECE); PIECES as usize];
        for n in 0..1000 {
            let posted = match &self.srq {
                Some(srq) => srq.post_recv(1, &sges),
                None => self.qps[0].post_recv(1, &sges),
            };
            if let Err(e) = posted {
                check!(
                    e.raw_os_error() == Some(errno::ENOMEM),
                    "{}: posting to a full queue: {e}",
                    self.what
                );
                return Ok(n);
            }
        }
        fail!("{}: a thousand receives were taken", self.what)
    }

    /// Posts a Send of `pieces` times `len` bytes.
    fn send(&self, qp: usize, pieces: u32, len: usize) -> Outcome {
        let wr = SendWr {
            sges: vec![self.mr.sge(0, len); pieces as usize],
            opcode: verbs::IBV_WR_SEND,
            flags: verbs::IBV_SEND_SIGNALED,
            ..SendWr::default()
        };
        self.qps[qp].post_send(&[wr]).map_err(|e| format!("{}: {e}", self.what))?;
        Ok(())
    }

    /// Waits for a completion, which must be a success.
    fn success(&self, ep: &Endpoint, step: &str) -> Outcome {
        match self.cq.poll_one(ep.wait).map_err(s)? {
            Some(wc) if wc.status == verbs::IBV_WC_SUCCESS => Ok(()),
            Some(wc) => fail!("{}: {step}: {}", self.what, verbs::status_name(wc.status)),
            None => fail!("{}: {step}: no completion", self.what),
        }
    }

    /// Polls up to `most` completions; their number.
    fn poll(&self, most: usize) -> Outcome<u32> {
        let n = self.cq.poll(&mut vec![Wc::default(); most]).map_err(s)?;
        Ok(n as u32)
    }

    /// Connects both QPs.
    fn connect(&self, ep: &Endpoint) -> Outcome {
        ep.connect(&self.qps, &Tuning::default()).map_err(|e| format!("{}: {e}", self.what))?;
        Ok(())
    }
}

/// A receive is outstanding until its completion is polled: a queue takes no more than its
/// depth, so that a program that posts until the queue is full never overflows a CQ that is as
/// deep. Own queue and shared queue; what a QP takes along when it is reset is given back.
pub fn slots(run: &Run, ep: &Endpoint) -> Outcome {
    if run.kind != "metaroce" {
        skip!("other devices may count otherwise");
    }
    for shared in [false, true] {
        let bench = Bench::new(ep, shared)?;
        let what = bench.what;
        let mut depth = 0;
        if !ep.leads {
            depth = bench.fill()?;
            check!(depth >= 16, "{what}: {depth} receives were taken, 16 were asked for");
        }
        bench.connect(ep)?;
        let theirs = ep.oob().exchange(&[u64::from(depth)]).map_err(s)?[0] as u32;
        for i in 0..theirs {
            bench.send(if shared { i as usize % 2 } else { 0 }, 1, 100)?;
            bench.success(ep, &format!("Send {i}"))?;
        }
        ep.barrier("sent").map_err(s)?;
        if !ep.leads {
            let n = bench.fill()?;
            check!(n == 0, "{what}: {n} receives were taken before a completion was polled");
            let n = bench.poll(5)?;
            check!(n == 5, "{what}: {n} completions instead of 5");
            let n = bench.fill()?;
            check!(n == 5, "{what}: {n} receives were taken after 5 completions");
            let n = bench.poll(64)?;
            check!(n == depth - 5, "{what}: {n} completions are left of {depth}, 5 polled");
            let n = bench.fill()?;
            check!(n == depth - 5, "{what}: {n} receives were taken after {} completions", depth - 5);
        }
        ep.barrier("full").map_err(s)?;
        if shared {
            for round in 0..6 {
                resets(ep, &bench, depth.max(theirs), round)?;
            }
        }
    }
    Ok(())
}

/// One QP is reset with a receive half filled, the other with a completion that nobody polls.
/// Both receives are given back: the queue takes its whole depth, and all of it arrives.
fn resets(ep: &Endpoint, bench: &Bench, depth: u32, round: u64) -> Outcome {
    let what = format!("reset {round}");
    if ep.leads {
        bench.send(1, 1, 200)?;
        bench.success(ep, &what)?;
        bench.send(0, PIECES, PIECE)?;
        std::thread::sleep(Duration::from_millis(round));
    }
    let reset = || -> Outcome {
        for qp in &bench.qps {
            qp.set_state(verbs::IBV_QPS_RESET).map_err(|e| format!("{what}: {e}"))?;
        }
        Ok(())
    };
    if ep.leads {
        reset()?;
        ep.barrier("reset").map_err(s)?;
    } else {
        ep.barrier("reset").map_err(s)?;
        reset()?;
        let n = bench.fill()?;
        check!(n == 2, "{what}: {n} receives were free afterwards instead of two");
        ep.barrier("filled").map_err(s)?;
    }
    if ep.leads {
        ep.barrier("filled").map_err(s)?;
    }
    for qp in &bench.qps {
        qp.init(ALL_ACCESS).map_err(s)?;
    }
    bench.connect(ep)?;
    for i in 0..depth {
        if ep.leads {
            bench.send(i as usize % 2, 1, 50)?;
        }
        bench.success(ep, &format!("{what}: message {i} of {depth}"))?;
    }
    if !ep.leads {
        let n = bench.fill()?;
        check!(n == depth, "{what}: {n} receives were taken afterwards instead of {depth}");
    }
    ep.barrier("round").map_err(s)?;
    Ok(())
}
