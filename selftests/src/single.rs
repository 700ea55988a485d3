// SPDX-License-Identifier: GPL-2.0
//! A connected QP, and one request after the other on it.

#![forbid(unsafe_code)]

use crate::endpoint::{Endpoint, Tuning};
use crate::ktap::Outcome;
use crate::verbs::{self, Qp, QpInit, SendWr, Wc};
use crate::{check, fail};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A QP that is connected, with an own CQ.
pub struct Single {
    /// The QP.
    pub qp: Arc<Qp>,
}

impl Single {
    /// Makes one on each end and connects them.
    pub fn new(ep: &Endpoint, tuning: &Tuning, depth: u32, sge: u32, inline: u32) -> Outcome<Self> {
        let cq = ep.cq(depth * 2).map_err(|e| format!("create_cq: {e}"))?;
        let qp = ep.qp(&QpInit::rc(&cq, &cq, depth, sge, inline)).map_err(|e| format!("create_qp: {e}"))?;
        ep.connect(&[qp.clone()], tuning).map_err(|e| format!("connecting: {e}"))?;
        Ok(Single { qp })
    }

    /// The next completion.
    pub fn completion(&self, ep: &Endpoint, what: &str) -> Outcome<Wc> {
        self.completion_within(ep.wait, what)
    }

    /// The same with a patience of its own.
    pub fn completion_within(&self, patience: Duration, what: &str) -> Outcome<Wc> {
        match self.qp.send_cq.poll_one(patience) {
            Ok(Some(wc)) => Ok(wc),
            Ok(None) => fail!("{what}: no completion within {} s", patience.as_secs()),
            Err(error) => fail!("{what}: {error}"),
        }
    }

    /// The next completion, which must be a success.
    pub fn success(&self, ep: &Endpoint, what: &str) -> Outcome<Wc> {
        self.success_within(ep.wait, what)
    }

    /// The same with a patience of its own.
    pub fn success_within(&self, patience: Duration, what: &str) -> Outcome<Wc> {
        let begin = Instant::now();
        let wc = self.completion_within(patience, what)?;
        check!(
            wc.status == verbs::IBV_WC_SUCCESS,
            "{what}: completed with {} (vendor {:#x}) after {} ms",
            verbs::status_name(wc.status),
            wc.vendor_err,
            begin.elapsed().as_millis()
        );
        Ok(wc)
    }

    /// Posts one signaled request and waits until it is done.
    pub fn run(&self, ep: &Endpoint, what: &str, wr: SendWr) -> Outcome {
        let wr = SendWr { flags: wr.flags | verbs::IBV_SEND_SIGNALED, wr_id: 0x77, ..wr };
        self.qp.post_send(&[wr]).map_err(|e| format!("{what}: {e}"))?;
        let wc = self.success(ep, what)?;
        check!(wc.wr_id == 0x77, "{what}: wr_id {:#x}", wc.wr_id);
        Ok(())
    }
}
