// SPDX-License-Identifier: GPL-2.0

//! What a connection tells about itself.

#![forbid(unsafe_code)]

use crate::proto::api::Time;
use crate::proto::path::Health;
use crate::proto::wire::Drop;

/// Sums since the connection was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Data packets sent for the first time.
    pub sent_packets: u64,
    /// Bytes of them, headers of ours included.
    pub sent_bytes: u64,
    /// Data packets received, duplicates included.
    pub rcvd_packets: u64,
    /// Payload bytes of them.
    pub rcvd_bytes: u64,
    /// Transmissions of packets that had been sent before.
    pub retransmits: u64,
    /// VOID packets sent.
    pub voids: u64,
    /// Packets moved to another path.
    pub moved: u64,
    /// Resends that turned out to be unnecessary.
    pub spurious: u64,
    /// Packets that the local queue did not take.
    pub unsent: u64,
    /// Acknowledgements sent.
    pub acks_sent: u64,
    /// Acknowledgements received.
    pub acks_rcvd: u64,
    /// Duplicates received on a path.
    pub duplicate_request: u64,
    /// Packets received out of sequence on a path.
    pub out_of_sequence: u64,
    /// Packets received with the mark CE.
    pub ce_rcvd: u64,
    /// Own packets that the peer received with the mark CE.
    pub ce_echoed: u64,
    /// Window cuts by marks and by loss in a queue.
    pub window_cuts: u64,
    /// Probes sent.
    pub probes_sent: u64,
    /// Replies to own probes.
    pub probe_replies: u64,
    /// Queries sent for streams.
    pub queries_sent: u64,
    /// RNR, NOT_READY and the like, received in stream blocks.
    pub refusals_rcvd: u64,
    /// Paths that were found silent.
    pub path_suspected: u64,
    /// Paths that were left.
    pub path_failed: u64,
    /// Paths that came back.
    pub path_recovered: u64,
    /// Times that it was closed because it was idle.
    pub rests: u64,
    /// Handshake packets sent.
    pub handshakes_sent: u64,
    /// Times the connection came up.
    pub established: u64,
    /// Received packets that were not used, by reason ([`Drop`]).
    pub drops: [u64; Drop::COUNT],
}

impl Counters {
    pub(super) fn count_drop(&mut self, why: Drop) {
        if let Some(c) = self.drops.get_mut(why as usize) {
            *c = c.wrapping_add(1);
        }
    }

    /// Packets that were not used for this reason.
    pub fn dropped(&self, why: Drop) -> u64 {
        self.drops.get(why as usize).copied().unwrap_or(0)
    }
}

/// State of a path, for display.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathInfo {
    /// Index.
    pub path: u8,
    /// Plane ([`super::PlaneInfo`]).
    pub plane: u8,
    /// Health.
    pub health: Health,
    /// UDP source port.
    pub port: u16,
    /// Epoch of its sequence.
    pub epoch: u16,
    /// Window in bytes.
    pub window: u32,
    /// Bytes in flight.
    pub inflight: u32,
    /// Smoothed round-trip time, ns.
    pub srtt: Time,
    /// Least round-trip time of the last seconds, ns; 0 is unknown.
    pub min_rtt: Time,
    /// Packets sent for the first time.
    pub packets: u64,
    /// Bytes of them.
    pub bytes: u64,
    /// Resends.
    pub resent: u64,
    /// Packets that another path took over.
    pub moved: u64,
    /// Packets received.
    pub received: u64,
    /// Own packets that were marked.
    pub ce: u64,
    /// Times it was left.
    pub failures: u32,
    /// Gap threshold.
    pub threshold: u32,
}
