// SPDX-License-Identifier: GPL-2.0
//! A connection that is given up: its packets are changed at will, so that what moves over it may be
//! wrong, end, or stand still. Beyond the memory that it has keys for, nothing may.

#![forbid(unsafe_code)]

use selftests::endpoint::{Endpoint, Remote, Tuning, ALL_ACCESS};
use selftests::fail;
use selftests::ktap::{Outcome, Stop};
use selftests::rng::Rng;
use selftests::sys::{self, Memory};
use selftests::verbs::{self, Context, Mr, Qp, QpInit, SendWr, Wc};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::Arc;

/// Bytes that are registered, in the middle of as many on either side.
const AREA: usize = 128 << 10;
/// Bytes of a receive.
const RECEIVE: usize = 256;
const RECEIVES: u64 = 16;
/// What is around the registered bytes.
const GUARD: u8 = 0xa5;

/// One end of it, with a context and a protection domain of its own.
pub struct Sacrifice {
    qp: Arc<Qp>,
    mr: Arc<Mr>,
    remote: Remote,
    seed: u64,
    /// Requests that ended well.
    pub done: AtomicU64,
    /// To be ended.
    pub stop: AtomicBool,
    /// Has ended by an error.
    pub failed: AtomicBool,
}

impl Sacrifice {
    /// Connects a QP over a connection that this DSCP (1 to 63) names. Both ends call it.
    pub fn new(ep: &Endpoint, dscp: u8, seed: u64) -> Outcome<Self> {
        let text = |e: std::io::Error| Stop::Fail(format!("the connection that is given up: {e}"));
        let context = Context::open(Some(&ep.context.name)).map_err(text)?;
        let pd = context.alloc_pd().map_err(text)?;
        let memory = Arc::new(Memory::new(3 * AREA).map_err(text)?);
        memory.set(0, 3 * AREA, GUARD);
        let mr = pd.reg_mr(&memory, AREA, AREA, ALL_ACCESS).map_err(text)?;
        let (send_cq, recv_cq) =
            (context.create_cq(64, None).map_err(text)?, context.create_cq(64, None).map_err(text)?);
        let qp = pd.create_qp(&QpInit::rc(&send_cq, &recv_cq, 32, 1, 0)).map_err(text)?;
        qp.init(ALL_ACCESS).map_err(text)?;
        let tuning = Tuning { timeout: 18, ..Tuning::default() };
        let mut connect = ep.plan(&[qp.clone()], &tuning).map_err(text)?[0];
        connect.traffic_class = dscp << 2;
        for i in 0..RECEIVES {
            qp.post_recv(i, &[mr.sge(0, RECEIVE)]).map_err(text)?;
        }
        qp.to_rtr(&connect).map_err(text)?;
        qp.to_rts(&connect).map_err(text)?;
        let remote = ep.exchange_memory(&[&mr]).map_err(text)?[0];
        Ok(Sacrifice {
            qp,
            mr,
            remote,
            seed,
            done: AtomicU64::new(0),
            stop: AtomicBool::new(false),
            failed: AtomicBool::new(false),
        })
    }

    /// Requests of all kinds, until `stop` or the first error.
    pub fn run(&self) {
        let mut rng = Rng::new(self.seed);
        let mut open = 0;
        while !self.stop.load(Ordering::Relaxed) {
            if self.receives().is_none() || self.requests(&mut rng, &mut open).is_none() {
                self.failed.store(true, Ordering::Relaxed);
                return;
            }
            sys::yield_now();
        }
    }

    /// Posts again what was received; None after an error.
    fn receives(&self) -> Option<()> {
        let mut wcs = [Wc::default(); 8];
        let n = self.qp.recv_cq.poll(&mut wcs).ok()?;
        for wc in &wcs[..n] {
            if wc.status != verbs::IBV_WC_SUCCESS {
                return None;
            }
            self.qp.post_recv(0, &[self.mr.sge(0, RECEIVE)]).ok()?;
        }
        Some(())
    }

    /// Takes completions, and posts four requests when all have ended; None after an error.
    fn requests(&self, rng: &mut Rng, open: &mut usize) -> Option<()> {
        let mut wcs = [Wc::default(); 4];
        let n = self.qp.send_cq.poll(&mut wcs).ok()?;
        if wcs[..n].iter().any(|wc| wc.status != verbs::IBV_WC_SUCCESS) {
            return None;
        }
        *open = open.saturating_sub(n);
        self.done.fetch_add(n as u64, Ordering::Relaxed);
        if *open != 0 {
            return Some(());
        }
        let mut wr = |opcode, len: usize| SendWr {
            opcode,
            sges: vec![self.mr.sge(0, len)],
            flags: verbs::IBV_SEND_SIGNALED,
            remote_addr: self.remote.addr + 8 * rng.below(4000),
            rkey: self.remote.rkey,
            compare_add: 1,
            ..SendWr::default()
        };
        let long = [100, 5000, 30_000][self.done.load(Ordering::Relaxed) as usize % 3];
        let list = [
            wr(verbs::IBV_WR_RDMA_WRITE, long),
            wr(verbs::IBV_WR_RDMA_READ, long),
            wr(verbs::IBV_WR_ATOMIC_FETCH_AND_ADD, 8),
            wr(verbs::IBV_WR_SEND, RECEIVE),
        ];
        self.qp.post_send(&list).ok()?;
        *open = list.len();
        Some(())
    }

    /// Nobody has written beside the registered bytes.
    pub fn guards(&self) -> Outcome {
        for at in [0, 2 * AREA] {
            let bytes = self.mr.memory.copy(at, AREA);
            if let Some(i) = bytes.iter().position(|b| *b != GUARD) {
                fail!("byte {} is {:#04x}: it is not registered", at + i, bytes[i]);
            }
        }
        Ok(())
    }
}
