// SPDX-License-Identifier: GPL-2.0
//! What the connection of a stream of requests is like meanwhile.

#![forbid(unsafe_code)]

use crate::Values;
use selftests::dv::{Connection, Dv, METAROCE_PATH_GOOD};
use selftests::verbs::{Cq, Qp};
use std::time::{Duration, Instant};

/// Looks at the connection of a QP every now and then, from [`Probe::begin`] to [`Probe::end`].
pub struct Probe {
    dv: Dv,
    every: Duration,
    due: Option<Instant>,
    armed: bool,
    before: Connection,
    after: Connection,
    looks: f64,
    /// Sums over the looks: bytes of the good paths, kbit/s.
    window: f64,
    inflight: f64,
    share: f64,
    /// Good paths that knew their round trip, and the sum of these, ns.
    paths: f64,
    srtt: f64,
}

impl Probe {
    /// Nothing was seen yet.
    pub fn new(every: Duration) -> Result<Self, String> {
        Ok(Probe {
            dv: Dv::load().map_err(|e| format!("--telemetry: {e}"))?,
            every,
            due: None,
            armed: false,
            before: Connection::default(),
            after: Connection::default(),
            looks: 0.0,
            window: 0.0,
            inflight: 0.0,
            share: 0.0,
            paths: 0.0,
            srtt: 0.0,
        })
    }

    /// What counts begins.
    pub fn begin(&mut self, qp: &Qp) -> Result<(), String> {
        self.before = self.look(qp)?;
        self.due = Some(Instant::now() + self.every);
        Ok(())
    }

    /// It is over.
    pub fn end(&mut self, qp: &Qp) -> Result<(), String> {
        self.after = self.look(qp)?;
        self.due = None;
        Ok(())
    }

    /// Nothing is to be done: waits for a completion, and looks when it is time.
    pub fn rest(&mut self, cq: &Cq, qp: &Qp) -> Result<(), String> {
        if !self.armed {
            self.armed = true;
            // What has come in between is found by the next poll.
            return cq.arm(false).map_err(|e| e.to_string());
        }
        let now = Instant::now();
        let wait = self.due.map_or(self.every, |due| due.saturating_duration_since(now));
        if let Some(channel) = &cq.channel {
            self.armed = !channel.wait(wait).map_err(|e| e.to_string())?;
        }
        if self.due.is_some_and(|due| Instant::now() >= due) {
            self.look(qp)?;
            self.due = Some(Instant::now() + self.every);
        }
        Ok(())
    }

    fn look(&mut self, qp: &Qp) -> Result<Connection, String> {
        let (connection, paths) = self.dv.paths(qp).map_err(|e| format!("metarocedv_query_paths: {e}"))?;
        self.looks += 1.0;
        self.share += connection.share as f64;
        for p in paths.iter().filter(|p| p.state == METAROCE_PATH_GOOD) {
            self.window += f64::from(p.window);
            self.inflight += f64::from(p.inflight);
            if p.srtt != 0 {
                self.paths += 1.0;
                self.srtt += p.srtt as f64;
            }
        }
        Ok(connection)
    }

    /// Values of the result line.
    pub fn values(&self) -> Values {
        let looks = self.looks.max(1.0);
        let grown = |f: fn(&Connection) -> u64| f(&self.after).wrapping_sub(f(&self.before)) as f64;
        vec![
            ("looks", self.looks),
            ("window_kb", self.window / looks / 1e3),
            ("inflight_kb", self.inflight / looks / 1e3),
            ("srtt_us", self.srtt / self.paths.max(1.0) / 1e3),
            ("share_mbit", self.share / looks / 1e3),
            ("sent", grown(|c| c.sent_packets)),
            ("resent", grown(|c| c.resent_packets)),
            ("spurious", grown(|c| c.spurious)),
            ("marked", grown(|c| c.ce_echoed)),
            ("cuts", grown(|c| c.window_cuts)),
        ]
    }
}
