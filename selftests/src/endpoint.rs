// SPDX-License-Identifier: GPL-2.0
//! One end of a test: an open device, its GID, and the control channel to the other end.

#![forbid(unsafe_code)]

use crate::args::{self, Args};
use crate::oob::Oob;
use crate::sys::Memory;
use crate::verbs::{self, Connect, Context, Cq, DeviceAttr, Mr, Pd, PortAttr, Qp, QpInit};
use std::io;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// How many connections have been planned.
static LIFE: AtomicU32 = AtomicU32::new(0);

/// Full access, as most tests register memory.
pub const ALL_ACCESS: u32 = verbs::IBV_ACCESS_LOCAL_WRITE
    | verbs::IBV_ACCESS_REMOTE_WRITE
    | verbs::IBV_ACCESS_REMOTE_READ
    | verbs::IBV_ACCESS_REMOTE_ATOMIC;

/// Pages of the device file below which the rings of a few objects are mapped: the RDMA core
/// gives each new ring the lowest offset that is free.
pub const RING_PAGES: u64 = 64;

/// The rings of queues with few entries have 1 to so many pages. A mapping has the length of its
/// ring, or fails.
pub const RING_LENGTHS: u64 = 3;

/// First bits of the node GUID of each metaroce device.
const GUID_MARK: u64 = 0x02_4d52;

/// Bytes of the longest header of a packet that carries data, beside IP and UDP
/// (rust/proto/PROTOCOL.md, "Data packet").
const HEADER: usize = 76;

/// Bytes of data in a full packet where packets of `mtu` bytes go: in units of 16, and at most
/// 61,440, for a UDP length says 65,535 at most.
pub fn payload_of(mtu: usize, ipv6: bool) -> usize {
    let ip_and_udp = if ipv6 { 48 } else { 28 };
    mtu.saturating_sub(ip_and_udp + HEADER).min(61_440) / 16 * 16
}

/// The same where the network has one of the usual MTUs: Ethernet's own, the 4200 that carry
/// 4096 bytes of data, jumbo frames.
pub fn usual_payloads() -> impl Iterator<Item = usize> {
    [1500, 4200, 9000].into_iter().flat_map(|mtu| [payload_of(mtu, false), payload_of(mtu, true)])
}

/// Where the other end is.
#[derive(Clone, Debug)]
pub enum Role {
    /// Wait for it.
    Listen(String),
    /// Connect to it.
    Connect(String),
    /// It is a thread of this process, on the second device.
    Pair(String, String),
}

impl Role {
    /// From --listen, --connect and --pair, or else from HOST and PEERS of the test harness.
    pub fn from_args(args: &mut Args) -> Role {
        if let Some(devices) = args.text("--pair") {
            return match devices.split_once(',') {
                Some((a, b)) => Role::Pair(a.into(), b.into()),
                None => Role::Pair(devices.clone(), devices),
            };
        }
        if let Some(addr) = args.text("--connect") {
            return Role::Connect(addr);
        }
        if let Some(addr) = args.text("--listen") {
            return Role::Listen(addr);
        }
        match (args::env::<u32>("HOST"), args::env::<String>("PEERS")) {
            (Some(1), _) => Role::Listen(crate::oob::PORT.to_string()),
            (Some(_), Some(peer)) => Role::Connect(peer),
            _ => args::usage("--listen PORT, --connect ADDRESS or --pair DEVICE,DEVICE is needed"),
        }
    }
}

/// Which device and GID an end uses.
#[derive(Clone, Debug, Default)]
pub struct Device {
    /// Name; without it RDMA_DEV, or the only device.
    pub name: Option<String>,
    /// GID index; without it GID4 or GID6, or the first fitting RoCE v2 GID.
    pub gid: Option<u32>,
    /// Prefer an IPv6 GID.
    pub ipv6: bool,
}

impl Device {
    /// From --dev, --gid and --ipv6.
    pub fn from_args(args: &mut Args) -> Device {
        let ipv6 = args.flag("--ipv6");
        Device {
            name: args.text("--dev").or_else(|| args::env("RDMA_DEV")),
            gid: args.value("--gid").or_else(|| args::env(if ipv6 { "GID6" } else { "GID4" })),
            ipv6,
        }
    }

    /// The same for the device `name`, whose GID is looked up.
    pub fn named(&self, name: &str) -> Device {
        Device { name: Some(name.into()), gid: None, ipv6: self.ipv6 }
    }
}

/// One end.
pub struct Endpoint {
    /// The device.
    pub context: Arc<Context>,
    /// A protection domain of it.
    pub pd: Arc<Pd>,
    /// Its attributes.
    pub device: DeviceAttr,
    /// Attributes of port 1.
    pub port: PortAttr,
    /// GID index in use.
    pub gid_index: u8,
    /// The GID itself.
    pub gid: [u8; 16],
    /// True on the end that leads (the one that connected).
    pub leads: bool,
    /// How long one completion may take.
    pub wait: Duration,
    /// How long QPs that the device refuses to connect are tried again: where the network
    /// fails on purpose, an interface may be down, or its MTU too small, for a moment.
    pub patience: Duration,
    oob: Mutex<Oob>,
}

/// Attributes of a connection that tests vary.
#[derive(Clone, Copy, Debug)]
pub struct Tuning {
    /// ACK timeout, 4.096 µs << n.
    pub timeout: u8,
    /// Retries.
    pub retry_cnt: u8,
    /// RNR retries.
    pub rnr_retry: u8,
    /// RNR timer code.
    pub min_rnr_timer: u8,
    /// READs and atomics in flight; None takes what the device allows, at most 16.
    pub rd_atomic: Option<u8>,
    /// `IBV_MTU_*`; None takes the port's active MTU.
    pub mtu: Option<u32>,
}

impl Default for Tuning {
    fn default() -> Self {
        Tuning { timeout: 17, retry_cnt: 7, rnr_retry: 7, min_rnr_timer: 12, rd_atomic: None, mtu: None }
    }
}

/// Memory of the other end.
#[derive(Clone, Copy, Debug, Default)]
pub struct Remote {
    /// Address of its first byte.
    pub addr: u64,
    /// Remote key.
    pub rkey: u32,
    /// Bytes.
    pub len: u64,
}

/// The line of a file of sysfs.
fn text_of(file: &str) -> io::Result<String> {
    let text = std::fs::read_to_string(file).map_err(|e| io::Error::new(e.kind(), format!("{file}: {e}")))?;
    Ok(text.trim().to_string())
}

/// The number in a file of sysfs.
fn number(file: &str) -> io::Result<u64> {
    let text = text_of(file)?;
    text.parse().map_err(|_| io::Error::other(format!("{file}: '{text}' is no number")))
}

fn is_v4(gid: &[u8; 16]) -> bool {
    gid.starts_with(&[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff])
}

/// The GID to use, as (index, bytes).
pub fn choose_gid(context: &Context, device: &Device) -> io::Result<(u32, [u8; 16])> {
    if let Some(index) = device.gid {
        return Ok((index, context.gid(index)?));
    }
    let rank = |gid: &[u8; 16]| match (is_v4(gid) != device.ipv6, gid.starts_with(&[0xfe, 0x80])) {
        (true, false) => 0,
        (true, true) => 1,
        (false, false) => 2,
        (false, true) => 3,
    };
    let mut gids: Vec<_> = context
        .gids()?
        .into_iter()
        .filter(|(_, kind, gid)| *kind == verbs::IBV_GID_TYPE_ROCE_V2 && gid.iter().any(|b| *b != 0))
        .collect();
    gids.sort_by_key(|(index, _, gid)| (rank(gid), *index));
    gids.first().map(|(index, _, gid)| (*index, *gid)).ok_or_else(|| {
        io::Error::other(format!("{} has no RoCE v2 GID: has its interface an address?", context.name))
    })
}

impl Endpoint {
    /// Opens the device and takes the control channel.
    pub fn open(device: &Device, oob: Oob, leads: bool, wait: Duration) -> io::Result<Self> {
        let context = Context::open(device.name.as_deref())?;
        let (gid_index, gid) = choose_gid(&context, device)?;
        oob.set_timeout(Some(wait * 4))?;
        Ok(Endpoint {
            pd: context.alloc_pd()?,
            device: context.query_device()?,
            port: context.query_port(1)?,
            gid_index: u8::try_from(gid_index).map_err(|_| io::Error::other("the GID index is above 255"))?,
            gid,
            leads,
            wait,
            patience: Duration::ZERO,
            oob: Mutex::new(oob),
            context,
        })
    }

    /// Opens the device anew, with the same control channel.
    pub fn reopen(self, device: &Device) -> io::Result<Self> {
        let Endpoint { oob, leads, wait, patience, pd, context, .. } = self;
        // Closed before it is opened again: the device may be on its way out.
        drop((pd, context));
        let oob = oob.into_inner().unwrap_or_else(|poison| poison.into_inner());
        Ok(Endpoint { patience, ..Endpoint::open(device, oob, leads, wait)? })
    }

    /// The control channel, for one conversation.
    pub fn oob(&self) -> MutexGuard<'_, Oob> {
        self.oob.lock().unwrap_or_else(|poison| poison.into_inner())
    }

    /// Waits for the other end at `point`.
    pub fn barrier(&self, point: &str) -> io::Result<()> {
        self.oob().barrier(point)
    }

    /// The same with a patience of its own.
    pub fn barrier_within(&self, patience: Duration, point: &str) -> io::Result<()> {
        let mut oob = self.oob();
        oob.set_timeout(Some(patience))?;
        let result = oob.barrier(point);
        oob.set_timeout(Some(self.wait * 4))?;
        result
    }

    /// Whether the device is one of this driver.
    pub fn is_metaroce(&self) -> bool {
        u64::from_be(self.device.node_guid) >> 40 == GUID_MARK
    }

    /// A file of the port in sysfs.
    fn port_file(&self, name: &str) -> String {
        format!("/sys/class/infiniband/{}/ports/1/{name}", self.context.name)
    }

    /// Hardware counters of the port as they are now; those in sysfs may be 10 ms old.
    pub fn counters<const N: usize>(&self, names: [&str; N]) -> io::Result<[u64; N]> {
        let link = format!("{}/1", self.context.name);
        let output = Command::new("rdma").args(["statistic", "show", "link", &link]).output()?;
        let text = String::from_utf8_lossy(&output.stdout);
        let mut values = [0; N];
        for (value, name) in values.iter_mut().zip(names) {
            let mut words = text.split_whitespace().skip_while(|word| *word != name);
            *value = words.nth(1).and_then(|word| word.parse().ok()).ok_or_else(|| {
                let error = String::from_utf8_lossy(&output.stderr);
                io::Error::other(format!("rdma statistic show link {link} has no {name}: {}", error.trim()))
            })?;
        }
        Ok(values)
    }

    /// Bytes of data in a full packet from one end to the other: what the MTU of the interface
    /// that has this end's GID leaves, the lesser of both. For other drivers' devices, the MTU
    /// that the port reports. Both ends call it.
    pub fn payload_mtu(&self) -> io::Result<usize> {
        let own = if self.is_metaroce() {
            let netdev = text_of(&self.port_file(&format!("gid_attrs/ndevs/{}", self.gid_index)))?;
            let mtu = number(&format!("/sys/class/net/{netdev}/mtu"))?;
            payload_of(usize::try_from(mtu).unwrap_or(0), !is_v4(&self.gid))
        } else {
            128 << self.port.active_mtu
        };
        let other = self.oob().exchange(&[own as u64])?;
        Ok(other.first().map_or(own, |o| own.min(usize::try_from(*o).unwrap_or(own))))
    }

    /// READs and atomics that a QP of this device may have in flight, at most 16.
    pub fn rd_atomic(&self) -> u8 {
        let most = self.device.max_qp_rd_atom.min(self.device.max_qp_init_rd_atom).clamp(0, 16);
        u8::try_from(most).unwrap_or(1)
    }

    /// A CQ without events.
    pub fn cq(&self, entries: u32) -> io::Result<Arc<Cq>> {
        self.context.create_cq(entries, None)
    }

    /// An RC QP, in INIT with full access.
    pub fn qp(&self, init: &QpInit) -> io::Result<Arc<Qp>> {
        let qp = self.pd.create_qp(init)?;
        qp.init(ALL_ACCESS)?;
        Ok(qp)
    }

    /// `len` bytes of new memory, registered with `access`.
    pub fn memory(&self, len: usize, access: u32) -> io::Result<Arc<Mr>> {
        self.pd.reg(&Arc::new(Memory::new(len)?), access)
    }

    /// Connects `qps` (in INIT) with as many of the other end, in order, up to RTS on both.
    /// Gives the attributes used for each.
    pub fn connect(&self, qps: &[Arc<Qp>], tuning: &Tuning) -> io::Result<Vec<Connect>> {
        let connects = self.plan(qps, tuning)?;
        for (qp, connect) in qps.iter().zip(&connects) {
            self.patiently(|| qp.to_rtr(connect))?;
        }
        for (qp, connect) in qps.iter().zip(&connects) {
            self.patiently(|| qp.to_rts(connect))?;
        }
        self.barrier("connected")?;
        Ok(connects)
    }

    /// Calls `step` until it succeeds or the patience is at its end.
    fn patiently(&self, step: impl Fn() -> io::Result<()>) -> io::Result<()> {
        let end = Instant::now() + self.patience;
        loop {
            match step() {
                Err(_) if Instant::now() < end => std::thread::sleep(Duration::from_millis(20)),
                result => return result,
            }
        }
    }

    /// Exchanges what `connect` needs and leaves the transitions to the caller.
    pub fn plan(&self, qps: &[Arc<Qp>], tuning: &Tuning) -> io::Result<Vec<Connect>> {
        let rd = tuning.rd_atomic.unwrap_or_else(|| self.rd_atomic()).min(self.rd_atomic());
        let mtu = tuning.mtu.unwrap_or(self.port.active_mtu).min(self.port.active_mtu);
        let (high, low) = self.gid.split_at(8);
        let word = |half: &[u8]| u64::from_be_bytes(half.try_into().unwrap_or([0; 8]));
        let mut words = vec![word(high), word(low), u64::from(rd), u64::from(mtu)];
        // Others each time: packets of an earlier life of the same QPs may still be on the way.
        let life = LIFE.fetch_add(1, Ordering::Relaxed);
        let psn = |qp: &Qp| (qp.number ^ life << 8).wrapping_mul(0x9e_3779) & 0xff_ffff;
        for qp in qps {
            words.push(u64::from(qp.number));
            words.push(u64::from(psn(qp)));
        }
        let theirs = self.oob().exchange(&words)?;
        if theirs.len() != words.len() {
            return Err(io::Error::other("the other end connects another number of QPs"));
        }
        let mut gid = [0; 16];
        gid[..8].copy_from_slice(&theirs[0].to_be_bytes());
        gid[8..].copy_from_slice(&theirs[1].to_be_bytes());
        let their_rd = u8::try_from(theirs[2]).unwrap_or(1);
        let mtu = mtu.min(theirs[3] as u32);
        Ok(qps
            .iter()
            .zip(theirs[4..].chunks_exact(2))
            .map(|(qp, their)| Connect {
                qpn: their[0] as u32,
                gid,
                gid_index: self.gid_index,
                rq_psn: their[1] as u32,
                sq_psn: psn(qp),
                mtu,
                rd_atomic: rd.min(their_rd),
                dest_rd_atomic: rd.min(their_rd),
                timeout: tuning.timeout,
                retry_cnt: tuning.retry_cnt,
                rnr_retry: tuning.rnr_retry,
                min_rnr_timer: tuning.min_rnr_timer,
                traffic_class: 0,
            })
            .collect())
    }

    /// Tells the other end about own memory and learns about its.
    pub fn exchange_memory(&self, mrs: &[&Arc<Mr>]) -> io::Result<Vec<Remote>> {
        let words: Vec<u64> =
            mrs.iter().flat_map(|mr| [mr.addr(0), u64::from(mr.rkey), mr.len as u64]).collect();
        let theirs = self.oob().exchange(&words)?;
        Ok(theirs.chunks_exact(3).map(|w| Remote { addr: w[0], rkey: w[1] as u32, len: w[2] }).collect())
    }
}

/// Runs `end` for this end of the test, or for both as threads; both have to succeed.
pub fn run(
    role: &Role,
    device: &Device,
    wait: Duration,
    end: impl Fn(Endpoint) -> Result<i32, String> + Send + Sync,
) -> Result<i32, String> {
    let open = |device: &Device, oob: Oob, leads: bool| {
        Endpoint::open(device, oob, leads, wait)
            .map_err(|error| format!("{}: {error}", device.name.as_deref().unwrap_or("device")))
    };
    match role {
        Role::Listen(addr) => {
            let oob = Oob::listen(addr).map_err(|error| format!("listening on {addr}: {error}"))?;
            end(open(device, oob, false)?)
        }
        Role::Connect(addr) => {
            let oob = Oob::connect(addr, Duration::from_secs(60))
                .map_err(|error| format!("connecting: {error}"))?;
            end(open(device, oob, true)?)
        }
        Role::Pair(a, b) => {
            let (left, right) = Oob::pair().map_err(|error| error.to_string())?;
            let (first, second) =
                (open(&device.named(a), left, true)?, open(&device.named(b), right, false)?);
            std::thread::scope(|scope| {
                let other = scope.spawn(|| end(second));
                let mine = end(first);
                let other = other.join().unwrap_or_else(|_| Err("the second end panicked".into()));
                match (mine, other) {
                    (Ok(a), Ok(b)) => Ok(a.max(b)),
                    (Err(a), Err(b)) => Err(format!("{a}\n{b}")),
                    (Err(a), _) | (_, Err(a)) => Err(a),
                }
            })
        }
    }
}
