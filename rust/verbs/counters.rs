// SPDX-License-Identifier: GPL-2.0

//! Counters of the port, as `rdma statistic show` and
//! `/sys/class/infiniband/<device>/ports/1/hw_counters` have them.

#![forbid(unsafe_code)]

use crate::kernel_ext::ib::StatDesc;
use ::core::sync::atomic::{AtomicU64, Ordering};

/// Paths that have a counter of their own.
pub const PATHS: usize = 64;

macro_rules! counters {
    ($($(#[$doc:meta])* $variant:ident = $name:literal,)* ; $($path:literal)*) => {
        /// A counter of the device, beside those of the paths.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(usize)]
        pub enum Stat {
            $($(#[$doc])* $variant,)*
        }

        /// Number of [`Stat`]s.
        const STATS: usize = [$(Stat::$variant),*].len();

        /// Their names, then those of the paths.
        static NAMES: [StatDesc; STATS + PATHS] = [
            $(StatDesc::new($name),)*
            $(StatDesc::new($path),)*
        ];
    };
}

counters! {
    /// Packets received, before any check.
    RxPackets = c"rcvd_pkts",
    /// Bytes of them, UDP payload.
    RxBytes = c"rcvd_bytes",
    /// Packets sent.
    TxPackets = c"sent_pkts",
    /// Bytes of them, UDP payload.
    TxBytes = c"sent_bytes",
    /// Packets sent again.
    Retransmits = c"retransmits",
    /// Packets that a full queue below refused.
    TxRefused = c"send_err",
    /// Received packets dropped for their CRC.
    DropCrc = c"drop_crc",
    /// Received packets dropped because they are malformed.
    DropMalformed = c"drop_malformed",
    /// Received packets that belong to no connection.
    DropNoConnection = c"drop_no_connection",
    /// Received packets that came twice.
    Duplicates = c"duplicate_request",
    /// Received packets that could not be taken then.
    DropRefused = c"drop_refused",
    /// Received packets that do not fit the state of their connection.
    DropState = c"drop_state",
    /// Received packets with a congestion mark.
    RxCongested = c"rcvd_ecn_marked",
    /// Paths that failed.
    PathFailures = c"path_failures",
    /// Connections made.
    Connections = c"connections_opened",
    /// Connections that could not be made or were lost.
    ConnectionErrors = c"connection_errors",
    ;
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
    stats: [AtomicU64; STATS],
    paths: [AtomicU64; PATHS],
}

impl Counters {
    /// All 0.
    pub const fn new() -> Self {
        Self {
            stats: [const { AtomicU64::new(0) }; STATS],
            paths: [const { AtomicU64::new(0) }; PATHS],
        }
    }

    /// Counts `n` more. Any context.
    pub fn add(&self, stat: Stat, n: u64) {
        if let Some(counter) = self.stats.get(stat as usize) {
            counter.fetch_add(n, Ordering::Relaxed);
        }
    }

    /// Counts `bytes` sent on a path. Any context.
    pub fn add_path(&self, path: u8, bytes: u64) {
        if let Some(counter) = self.paths.get(usize::from(path)) {
            counter.fetch_add(bytes, Ordering::Relaxed);
        }
    }

    /// The names, in the order of [`Counters::read`].
    pub fn names() -> &'static [StatDesc] {
        &NAMES
    }

    /// Puts the values into `to`.
    pub fn read(&self, to: &mut [u64]) {
        for (to, from) in to.iter_mut().zip(self.stats.iter().chain(&self.paths)) {
            *to = from.load(Ordering::Relaxed);
        }
    }
}
