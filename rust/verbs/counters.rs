// SPDX-License-Identifier: GPL-2.0

//! Counters of the port, as `rdma statistic show` and
//! `/sys/class/infiniband/<device>/ports/1/hw_counters` have them: the sums over all
//! connections, received packets that were dropped by reason, bytes sent by path.
//!
//! Nothing is refused but other ports than 1 (see [`super`]).

#![forbid(unsafe_code)]

use crate::{
    kernel_ext::ib::StatDesc,
    proto::{connection, wire},
};
use ::core::sync::atomic::{AtomicU64, Ordering};

/// Paths that have a counter of their own.
pub const PATHS: usize = 64;

/// Kinds of dropped packets; all counters of a port have to fit into one netlink message.
const DROPS: usize = 13;

/// The kind of those for which an inbox had no room.
const BACKLOG: usize = 12;

/// The kind that a reason belongs to: an index into the names below.
fn kind(why: wire::Drop) -> usize {
    use wire::Drop;
    match why {
        Drop::Short | Drop::Type | Drop::Length | Drop::Field => 0,
        Drop::Version => 1,
        Drop::Crc => 2,
        Drop::NoConnection => 3,
        Drop::State | Drop::Epoch | Drop::Cookie => 4,
        Drop::Path | Drop::PathSequence | Drop::AckInvalid => 5,
        Drop::PathDuplicate | Drop::StreamDuplicate | Drop::Old => 6,
        Drop::UnknownStream => 7,
        Drop::StreamWindow => 8,
        Drop::Refused => 9,
        Drop::StreamInvalid => 10,
        Drop::StreamState => 11,
    }
}

macro_rules! counters {
    ($($field:ident = $name:literal,)* ; drops $($drop:literal)* ; paths $($path:literal)*) => {
        /// Number of counters that connections keep.
        const CONNECTION: usize = [$($name),*].len();

        /// Names in the order of [`Counters::read`].
        static NAMES: [StatDesc; CONNECTION + DROPS + 2 + PATHS] = [
            $(StatDesc::new($name),)*
            $(StatDesc::new($drop),)*
            StatDesc::new(c"conn_errors"),
            StatDesc::new(c"no_memory"),
            $(StatDesc::new($path),)*
        ];

        /// What a connection counts.
        fn values(from: &connection::Counters) -> [u64; CONNECTION] {
            [$(from.$field),*]
        }
    };
}

counters! {
    sent_packets = c"sent_pkts",
    sent_bytes = c"sent_bytes",
    rcvd_packets = c"rcvd_pkts",
    rcvd_bytes = c"rcvd_bytes",
    retransmits = c"retransmits",
    moved = c"moved_pkts",
    spurious = c"spurious",
    unsent = c"send_err",
    acks_sent = c"acks_sent",
    duplicate_request = c"duplicate_request",
    out_of_sequence = c"out_of_seq_request",
    ce_rcvd = c"rcvd_ecn_marked",
    ce_echoed = c"sent_ecn_marked",
    window_cuts = c"window_cuts",
    probes_sent = c"probes_sent",
    queries_sent = c"queries_sent",
    refusals_rcvd = c"rcvd_rnr_err",
    path_suspected = c"path_suspected",
    path_failed = c"path_failed",
    path_recovered = c"path_recovered",
    handshakes_sent = c"handshakes",
    established = c"conn_opened",
    ;
    drops
    c"drop_malformed" c"drop_version" c"drop_crc" c"drop_no_conn"
    c"drop_state" c"drop_path" c"drop_duplicate" c"drop_unknown_qp"
    c"drop_window" c"drop_refused" c"drop_invalid" c"drop_qp_state"
    c"drop_backlog"
    ;
    paths
    c"path0_tx_bytes" c"path1_tx_bytes" c"path2_tx_bytes" c"path3_tx_bytes"
    c"path4_tx_bytes" c"path5_tx_bytes" c"path6_tx_bytes" c"path7_tx_bytes"
    c"path8_tx_bytes" c"path9_tx_bytes" c"path10_tx_bytes" c"path11_tx_bytes"
    c"path12_tx_bytes" c"path13_tx_bytes" c"path14_tx_bytes" c"path15_tx_bytes"
    c"path16_tx_bytes" c"path17_tx_bytes" c"path18_tx_bytes" c"path19_tx_bytes"
    c"path20_tx_bytes" c"path21_tx_bytes" c"path22_tx_bytes" c"path23_tx_bytes"
    c"path24_tx_bytes" c"path25_tx_bytes" c"path26_tx_bytes" c"path27_tx_bytes"
    c"path28_tx_bytes" c"path29_tx_bytes" c"path30_tx_bytes" c"path31_tx_bytes"
    c"path32_tx_bytes" c"path33_tx_bytes" c"path34_tx_bytes" c"path35_tx_bytes"
    c"path36_tx_bytes" c"path37_tx_bytes" c"path38_tx_bytes" c"path39_tx_bytes"
    c"path40_tx_bytes" c"path41_tx_bytes" c"path42_tx_bytes" c"path43_tx_bytes"
    c"path44_tx_bytes" c"path45_tx_bytes" c"path46_tx_bytes" c"path47_tx_bytes"
    c"path48_tx_bytes" c"path49_tx_bytes" c"path50_tx_bytes" c"path51_tx_bytes"
    c"path52_tx_bytes" c"path53_tx_bytes" c"path54_tx_bytes" c"path55_tx_bytes"
    c"path56_tx_bytes" c"path57_tx_bytes" c"path58_tx_bytes" c"path59_tx_bytes"
    c"path60_tx_bytes" c"path61_tx_bytes" c"path62_tx_bytes" c"path63_tx_bytes"
}

/// The counters of a device. They only grow.
pub struct Counters {
    /// What connections that have ended had counted.
    ended: [AtomicU64; CONNECTION],
    drops: [AtomicU64; DROPS],
    errors: AtomicU64,
    memory: AtomicU64,
    paths: [AtomicU64; PATHS],
}

/// Sums over connections.
pub struct Sums([u64; CONNECTION]);

impl Sums {
    /// Adds what a connection has counted.
    pub fn add(&mut self, counters: &connection::Counters) {
        for (to, from) in self.0.iter_mut().zip(values(counters)) {
            *to = to.wrapping_add(from);
        }
    }
}

impl Default for Counters {
    fn default() -> Self {
        Self::new()
    }
}

impl Counters {
    /// All 0.
    pub const fn new() -> Self {
        Self {
            ended: [const { AtomicU64::new(0) }; CONNECTION],
            drops: [const { AtomicU64::new(0) }; DROPS],
            errors: AtomicU64::new(0),
            memory: AtomicU64::new(0),
            paths: [const { AtomicU64::new(0) }; PATHS],
        }
    }

    /// Counts a received packet that was dropped. Any context.
    pub fn drop(&self, why: wire::Drop) {
        if let Some(counter) = self.drops.get(kind(why)) {
            counter.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Counts a packet for which an inbox had no room. Any context.
    pub fn drop_backlog(&self) {
        if let Some(counter) = self.drops.get(BACKLOG) {
            counter.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Counts a connection that could not be made, or was lost. Any context.
    pub fn connection_error(&self) {
        self.errors.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts that there was no memory for a connection that had use for more. Any context.
    pub fn no_memory(&self) {
        self.memory.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts `bytes` sent on a path. Any context.
    pub fn add_path(&self, path: u8, bytes: u64) {
        if let Some(counter) = self.paths.get(usize::from(path)) {
            counter.fetch_add(bytes, Ordering::Relaxed);
        }
    }

    /// Keeps what a connection has counted that ends. Any context.
    pub fn ended(&self, counters: &connection::Counters) {
        for (to, from) in self.ended.iter().zip(values(counters)) {
            to.fetch_add(from, Ordering::Relaxed);
        }
    }

    /// The names, in the order of [`Counters::read`], of a device with this many paths.
    pub fn names(paths: usize) -> &'static [StatDesc] {
        let count = NAMES.len() - PATHS + paths.min(PATHS);
        NAMES.get(..count).unwrap_or(&NAMES)
    }

    /// Puts the values into `to`; `live` adds what the connections of now have counted.
    pub fn read(&self, to: &mut [u64], live: impl FnOnce(&mut Sums)) {
        let mut sums = Sums([0; CONNECTION]);
        live(&mut sums);
        let ended = self.ended.iter().map(|c| c.load(Ordering::Relaxed));
        let connections = sums.0.iter().zip(ended).map(|(a, b)| a.wrapping_add(b));
        let rest = self
            .drops
            .iter()
            .chain([&self.errors, &self.memory])
            .chain(&self.paths)
            .map(|c| c.load(Ordering::Relaxed));
        for (to, from) in to.iter_mut().zip(connections.chain(rest)) {
            *to = from;
        }
    }
}
