// SPDX-License-Identifier: GPL-2.0

//! What all endpoints share: time, events, fabric, packets.

#![forbid(unsafe_code)]

use super::fabric::{Fabric, Node, Ps, Sent};
use super::packet::{Kind, Packets, NONE};
use super::queue::Queue;
use crate::Rng;

/// Something that is to happen.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Event {
    /// A packet has come over a line.
    Arrive { packet: u32, port: u32 },
    /// With PFC: a line is free again.
    Left { packet: u32, port: u32 },
    /// With PFC: a port is told to stop or to go on.
    Pause { port: u32, stop: bool },
    /// A host looks at what came in.
    Batch { host: u32 },
    /// The timer of a connection.
    Timer { host: u32, conn: u32 },
    /// A host's port has room again.
    Nic { port: u32 },
    /// Retransmission timer of a model's flow.
    Rto { flow: u32 },
    /// Rate timer of a model's flow.
    Rate { flow: u32 },
    /// A message is to be posted.
    Post { index: u32 },
    /// Something breaks or is mended.
    Fault { index: u32 },
    /// Switches learn what is alive.
    Converge,
    /// Values are written down.
    Sample,
    /// A phase of the run ends.
    Phase,
}

/// What the traffic is told.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Note {
    /// A message is complete at its receiver.
    Received { tag: u32 },
    /// A message is complete at its sender.
    Sent,
    /// A message failed at its sender.
    Failed,
}

/// Sums over a run.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sums {
    pub(crate) events: u64,
    /// Packets that entered the network at a host.
    pub(crate) packets: u64,
    /// Payload bytes that arrived at hosts for the first time.
    pub(crate) delivered: u64,
    pub(crate) resent: u64,
    pub(crate) unroutable: u64,
    /// Packets that a host's own queue refused.
    pub(crate) refused: u64,
}

pub(crate) struct Net {
    pub(crate) now: Ps,
    pub(crate) queue: Queue<Event>,
    pub(crate) fabric: Fabric,
    pub(crate) packets: Packets,
    pub(crate) rng: Rng,
    pub(crate) notes: Vec<Note>,
    pub(crate) sums: Sums,
    /// Messages, by tag, that were posted and are not complete at their receiver.
    pub(crate) open: Vec<bool>,
}

impl Net {
    /// A message is posted.
    pub(crate) fn opens(&mut self, tag: u32) {
        let i = tag as usize;
        if self.open.len() <= i {
            self.open.resize(i + 1, false);
        }
        assert!(!self.open[i], "a tag is used for one message at a time");
        self.open[i] = true;
    }

    /// A message is complete at its receiver.
    pub(crate) fn received(&mut self, tag: u32) {
        let open = std::mem::take(&mut self.open[tag as usize]);
        assert!(open, "a message is received once");
        self.notes.push(Note::Received { tag });
    }

    pub(crate) fn at(&mut self, at: Ps, event: Event) {
        self.queue.push(at, event);
    }

    /// A packet enters a port.
    pub(crate) fn send(&mut self, port: usize, id: u32) {
        let p = self.packets.get_mut(id);
        match self.fabric.send(self.now, port, id, p, &mut self.rng) {
            Sent::Arrives(at) => {
                let port = port as u32;
                self.queue.push(at, Event::Arrive { packet: id, port });
            }
            Sent::Waits => self.start(port),
            Sent::Dropped => {
                self.passed_on(id);
                self.packets.free(id);
            }
        }
    }

    fn start(&mut self, port: usize) {
        if let Some(id) = self.fabric.start(port) {
            let size = self.packets.get(id).size;
            let at = self.now + self.fabric.ports[port].line_time(size);
            let port = port as u32;
            self.queue.push(at, Event::Left { packet: id, port });
        }
    }

    /// With PFC: the switch that held the packet does so no more.
    fn passed_on(&mut self, id: u32) {
        let p = self.packets.get_mut(id);
        let (from, size) = (p.ingress, p.size);
        if from == NONE {
            return;
        }
        p.ingress = NONE;
        self.hold(from, -i64::from(size));
    }

    fn hold(&mut self, port: u32, size: i64) {
        if let Some(stop) = self.fabric.hold(port as usize, size) {
            let at = self.now + self.fabric.ports[port as usize].delay;
            self.queue.push(at, Event::Pause { port, stop });
        }
    }

    /// A packet has left its port. True when the port, a host's, has nothing more to send.
    pub(crate) fn left(&mut self, port: u32, id: u32) -> bool {
        let i = port as usize;
        let size = self.packets.get(id).size;
        let (_, lost) = self.fabric.finish(i, size, &mut self.rng);
        self.passed_on(id);
        if lost {
            self.packets.free(id);
        } else {
            let at = self.now + self.fabric.ports[i].delay;
            self.queue.push(at, Event::Arrive { packet: id, port });
        }
        self.start(i);
        self.fabric.is_idle(self.now, i)
    }

    pub(crate) fn pause(&mut self, port: u32, stop: bool) {
        self.fabric.pause(port as usize, stop);
        if !stop {
            self.start(port as usize);
        }
    }

    /// A packet has come over `port`: switches pass it on, and what has reached its host is
    /// given back.
    pub(crate) fn arrive(&mut self, port: u32, id: u32) -> Option<usize> {
        let at = self.fabric.ports[port as usize].to;
        if let Node::Host(h) = at {
            return Some(h as usize);
        }
        if self.fabric.layout.pfc != 0 {
            let p = self.packets.get_mut(id);
            p.ingress = port;
            let size = i64::from(p.size);
            self.hold(port, size);
        }
        match self.fabric.route(self.now, at, self.packets.get(id)) {
            Some(out) => self.send(out, id),
            None => {
                self.sums.unroutable += 1;
                self.passed_on(id);
                self.packets.free(id);
            }
        }
        None
    }

    /// The port of a host for a packet of it.
    pub(crate) fn host_port(&self, host: usize, hash: u64) -> usize {
        let plane = self.fabric.plane_of(self.now, host, hash);
        self.fabric.host_port(host, plane)
    }

    /// A packet leaves its host, whose port has room.
    pub(crate) fn leave(&mut self, port: usize, id: u32) {
        self.sums.packets += 1;
        let plane = port % self.fabric.layout.planes;
        let p = self.packets.get_mut(id);
        p.plane = plane as u16;
        p.ingress = NONE;
        p.ce = false;
        debug_assert!(p.kind != Kind::Real || p.header_len != 0);
        self.send(port, id);
    }
}
