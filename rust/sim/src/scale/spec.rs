// SPDX-License-Identifier: GPL-2.0

//! From a run file to the runs that it asks for: every combination of what it gives as arrays.

#![forbid(unsafe_code)]

use super::endpoint::{HostSetup, PlaneBy};
use super::fabric::{Layout, Ps};
use super::model::Model;
use super::text::{bytes, number, rate, time, Section};
use super::traffic::{Job, Kind};
use super::world::{Change, Fault, Link, Setup, Transport};
use metaroce::proto::congestion::Controller;

/// Keys of the sections that describe a run, with their defaults and what they mean.
pub(crate) const KEYS: &[(&str, &str, &str)] = &[
    ("run.seed", "1", "everything random follows from it"),
    ("run.warm", "1ms", "endless traffic: counts from here"),
    ("run.time", "2ms", "endless traffic: for so long"),
    (
        "run.limit",
        "2s",
        "a run that has not ended then has failed",
    ),
    (
        "run.sample",
        "0s",
        "distance of the samples of the time series; 0 is none",
    ),
    ("fabric.hosts", "16", ""),
    ("fabric.hosts_per_leaf", "8", ""),
    ("fabric.spines", "8", "per plane, at most 64"),
    (
        "fabric.planes",
        "1",
        "separate fabrics; hosts choose by the hash of addresses and ports",
    ),
    (
        "fabric.rate",
        "400G",
        "of a host's line in each plane, bit/s",
    ),
    (
        "fabric.spine_rate",
        "400G",
        "of the lines between leaves and spines",
    ),
    (
        "fabric.down_rate",
        "0",
        "of the ports of leaves towards hosts; 0: fabric.rate",
    ),
    ("fabric.delay", "600ns", "of each link, switch included"),
    (
        "fabric.far",
        "0",
        "so many hosts, the last ones, are further away",
    ),
    (
        "fabric.far_delay",
        "0s",
        "by this on the link to their leaf, each direction",
    ),
    ("fabric.buffer", "4M", "bytes that a switch port may queue"),
    ("fabric.mark_min", "200K", "marks begin here; 0 is no ECN"),
    (
        "fabric.mark_max",
        "800K",
        "from here on every packet is marked",
    ),
    (
        "fabric.mark_chance",
        "20%",
        "probability of a mark just below mark_max",
    ),
    (
        "fabric.red_weight",
        "0",
        "RED, as Linux has it: part of the present queue in the average that marks; 0: the queue \
         itself marks, each packet by chance",
    ),
    (
        "fabric.host_buffer",
        "16M",
        "bytes that may queue in a host's own port",
    ),
    (
        "fabric.pfc",
        "500K",
        "roce-pfc: bytes of one port that a switch holds before it stops it",
    ),
    (
        "fabric.loss",
        "0",
        "packets that vanish between host and leaf, each direction",
    ),
    (
        "fabric.converge",
        "0s",
        "switches learn so much later that a link has died; 0 is never",
    ),
    (
        "transport.kind",
        "metaroce",
        "metaroce, roce (lossy), roce-pfc, selective, ideal",
    ),
    ("transport.mtu", "9000", "bytes of an IP packet"),
    ("transport.paths", "16", "metaroce: paths of a connection"),
    (
        "transport.records",
        "64",
        "metaroce: outstanding packets of a path at first (grows to 256)",
    ),
    (
        "transport.hint",
        "true",
        "metaroce: receivers divide their rate among the senders",
    ),
    (
        "transport.batch",
        "500ns",
        "metaroce: hosts handle together what comes within",
    ),
    (
        "transport.stall",
        "0s",
        "metaroce: hosts stand still for so long once a second, as on a machine that is busy",
    ),
    (
        "transport.margin",
        "50us",
        "metaroce: least margin of a verdict on silence",
    ),
    (
        "transport.batching",
        "100us",
        "metaroce: what a share allows hosts for batching",
    ),
    (
        "transport.pull",
        "64K",
        "metaroce: bytes in a host's port above which connections wait; 0: they do not",
    ),
    (
        "transport.turn",
        "2",
        "metaroce: packets of a connection before the next one's turn",
    ),
    (
        "transport.plane_by",
        "hash",
        "metaroce: a packet's plane follows from the hash of addresses and ports, from the number of \
         its path (path), or planes are devices of their own, with addresses (core)",
    ),
    (
        "transport.controller",
        "aimd",
        "metaroce: what the windows of the paths do: aimd, fixed",
    ),
    (
        "transport.qps",
        "1",
        "metaroce: queue pairs per pair of hosts",
    ),
    ("transport.rto", "500us", "models: retransmission timeout"),
    (
        "traffic.kind",
        "permutation",
        "ring, all-to-all, permutation, incast, storage, stream (incast without an end)",
    ),
    (
        "traffic.size",
        "1M",
        "bytes: of a rank's buffer (ring, all-to-all), of a message, of a read",
    ),
    (
        "traffic.repeat",
        "1",
        "iterations that count (ring, all-to-all)",
    ),
    ("traffic.warm", "1", "iterations before, which do not"),
    (
        "traffic.rings",
        "4",
        "rings over which a buffer is spread, each in an order of its own",
    ),
    (
        "traffic.peers",
        "8",
        "peers to which a rank sends at once (all-to-all); 0: all of them",
    ),
    (
        "traffic.senders",
        "8",
        "senders (incast, stream), clients (storage; the other hosts are servers)",
    ),
    (
        "traffic.depth",
        "2",
        "messages or reads that are kept outstanding",
    ),
    (
        "traffic.stripe",
        "8",
        "servers over which a read is striped",
    ),
    (
        "traffic.spread",
        "10us",
        "ranks and senders begin within this time (ring, all-to-all, incast)",
    ),
    (
        "traffic.early",
        "0",
        "incast: senders that begin `lead` before the others",
    ),
    ("traffic.lead", "0s", ""),
];

/// One run: its settings as text, and what they mean.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    /// What varies in the file: keys and their values here.
    pub(crate) axes: Vec<(String, String)>,
    pub(crate) values: Vec<(String, String)>,
    pub(crate) setup: Setup,
}

/// All cases of a file, `overrides` (`section.key=value`, or with several values separated by
/// commas) applied. With `[[scenario]]`s those of each: `name`, what it sets (`set`, as overrides)
/// and the names of the faults that it has (`faults`).
pub(crate) fn cases(
    sections: &[Section],
    overrides: &[(String, String)],
) -> Result<Vec<Case>, String> {
    let mut all = Vec::new();
    for s in sections.iter().filter(|s| s.name == "scenario") {
        let name = s.one("name").ok_or("scenario: name is missing")?;
        let mut set = Vec::new();
        for text in s.get("set").unwrap_or(&[]) {
            let (key, value) = text
                .split_once('=')
                .ok_or_else(|| format!("scenario {name}: {text:?} is not KEY=VALUE"))?;
            set.push((key.trim().to_string(), value.trim().to_string()));
        }
        set.extend_from_slice(overrides);
        let faults = s.get("faults").unwrap_or(&[]);
        let fits = |f: &Section| f.one("name").is_some_and(|n| faults.iter().any(|x| x == n));
        for mut case in plain(sections, &set, &fits)? {
            case.axes.insert(0, ("scenario".into(), name.into()));
            all.push(case);
        }
    }
    if all.is_empty() {
        return plain(sections, overrides, &|_| true);
    }
    Ok(all)
}

/// Every combination of what the file and the overrides give, with the faults that fit.
fn plain(
    sections: &[Section],
    overrides: &[(String, String)],
    fits: &dyn Fn(&Section) -> bool,
) -> Result<Vec<Case>, String> {
    let mut all: Vec<(String, Vec<String>)> = KEYS
        .iter()
        .map(|k| (k.0.to_string(), vec![k.1.to_string()]))
        .collect();
    let mut set = |key: String, values: Vec<String>| match all.iter_mut().find(|k| k.0 == key) {
        Some(k) => {
            k.1 = values;
            Ok(())
        }
        None => Err(format!("there is no setting {key:?}")),
    };
    for s in sections {
        let beside = ["", "fault", "plot", "series", "expect", "scenario", "agree"];
        if beside.contains(&s.name.as_str()) {
            continue;
        }
        for (key, values) in &s.keys {
            set(format!("{}.{key}", s.name), values.clone())?;
        }
    }
    for (key, value) in overrides {
        set(key.clone(), value.split(',').map(str::to_string).collect())?;
    }
    let faults = sections.iter().filter(|s| s.name == "fault" && fits(s));
    let faults: Vec<&Section> = faults.collect();
    let count: usize = all.iter().map(|k| k.1.len()).product();
    let mut cases = Vec::new();
    for n in 0..count {
        let mut rest = n;
        let mut values = Vec::new();
        let mut axes = Vec::new();
        // The last key varies fastest.
        for (key, list) in all.iter().rev() {
            let v = list[rest % list.len()].clone();
            rest /= list.len();
            if list.len() > 1 {
                axes.push((key.clone(), v.clone()));
            }
            values.push((key.clone(), v));
        }
        axes.reverse();
        values.reverse();
        let setup = setup(&values, &faults)?;
        cases.push(Case {
            axes,
            values,
            setup,
        });
    }
    Ok(cases)
}

fn setup(values: &[(String, String)], faults: &[&Section]) -> Result<Setup, String> {
    let text = |key: &str| {
        values
            .iter()
            .find(|v| v.0 == key)
            .map_or("", |v| v.1.as_str())
    };
    let what = |key: &str, r: Result<f64, String>| r.map_err(|e| format!("{key}: {e}"));
    let num = |key: &str| what(key, number(text(key)));
    let byt = |key: &str| what(key, bytes(text(key)));
    let rat = |key: &str| what(key, rate(text(key)));
    let tim = |key: &str| what(key, time(text(key))).map(|t| t as Ps);
    let flag = |key: &str| match text(key) {
        "true" | "on" => Ok(true),
        "false" | "off" => Ok(false),
        other => Err(format!("{key}: {other:?} is neither true nor false")),
    };
    let kind = text("transport.kind");
    let transport = match kind {
        "metaroce" => Transport::Metaroce,
        "roce" | "roce-pfc" => Transport::Model(Model::GoBackN),
        "selective" => Transport::Model(Model::Selective),
        "ideal" => Transport::Model(Model::Ideal),
        _ => return Err(format!("transport.kind: {kind:?} is unknown")),
    };
    let layout = Layout {
        hosts: num("fabric.hosts")? as usize,
        hosts_per_leaf: (num("fabric.hosts_per_leaf")? as usize).max(1),
        spines: num("fabric.spines")? as usize,
        planes: (num("fabric.planes")? as usize).max(1),
        rate: rat("fabric.rate")?,
        spine_rate: rat("fabric.spine_rate")?,
        down_rate: match rat("fabric.down_rate")? {
            0.0 => rat("fabric.rate")?,
            r => r,
        },
        delay: tim("fabric.delay")?,
        far: num("fabric.far")? as usize,
        far_delay: tim("fabric.far_delay")?,
        buffer: byt("fabric.buffer")? as u64,
        mark_min: byt("fabric.mark_min")? as u64,
        mark_max: byt("fabric.mark_max")? as u64,
        mark_chance: num("fabric.mark_chance")?,
        red_weight: num("fabric.red_weight")?,
        host_buffer: byt("fabric.host_buffer")? as u64,
        pfc: if kind == "roce-pfc" {
            byt("fabric.pfc")? as u64
        } else {
            0
        },
        ideal: kind == "ideal",
    };
    if layout.spines > 64 || layout.hosts < 2 || layout.planes > 8 {
        return Err("at least 2 hosts, at most 64 spines and 8 planes".into());
    }
    let hosts = layout.hosts;
    let seed = num("run.seed")? as u64;
    let traffic = text("traffic.kind");
    let job = Job {
        kind: Kind::parse(traffic)
            .ok_or_else(|| format!("traffic.kind: {traffic:?} is unknown"))?,
        hosts,
        hosts_per_leaf: layout.hosts_per_leaf,
        size: byt("traffic.size")? as u64,
        repeat: num("traffic.repeat")? as u32,
        warm: num("traffic.warm")? as u32,
        rings: (num("traffic.rings")? as usize).max(1),
        peers: num("traffic.peers")? as usize,
        senders: num("traffic.senders")? as usize,
        depth: (num("traffic.depth")? as usize).max(1),
        stripe: (num("traffic.stripe")? as usize).max(1),
        spread: tim("traffic.spread")?,
        early: num("traffic.early")? as usize,
        lead: tim("traffic.lead")?,
    };
    if matches!(job.kind, Kind::Incast | Kind::Stream | Kind::Storage) && job.senders >= hosts {
        return Err("traffic.senders: there are not so many hosts".into());
    }
    let controller = text("transport.controller");
    let controller = Controller::from_name(controller)
        .ok_or_else(|| format!("transport.controller: {controller:?} is unknown"))?;
    let host = HostSetup {
        controller,
        mtu: num("transport.mtu")? as u32,
        paths: num("transport.paths")? as u8,
        records: num("transport.records")? as u16,
        hint: flag("transport.hint")?,
        batch: tim("transport.batch")?,
        stall: tim("transport.stall")?,
        margin: tim("transport.margin")? / 1000,
        batching: tim("transport.batching")? / 1000,
        pull: byt("transport.pull")? as u64,
        planes: layout.planes,
        plane_by: match text("transport.plane_by") {
            "hash" => PlaneBy::Hash,
            "path" => PlaneBy::Path,
            "core" => PlaneBy::Core,
            other => return Err(format!("transport.plane_by: {other:?}")),
        },
        turn: (num("transport.turn")? as usize).max(1),
        seed,
    };
    let setup = Setup {
        seed,
        transport,
        layout,
        host,
        rto: tim("transport.rto")?,
        loss: num("fabric.loss")?,
        job,
        qps: (num("transport.qps")? as usize).max(1),
        faults: faults.iter().map(|f| fault(f)).collect::<Result<_, _>>()?,
        converge: tim("fabric.converge")?,
        warm: tim("run.warm")?,
        time: tim("run.time")?,
        limit: tim("run.limit")?,
        sample: tim("run.sample")?,
    };
    for f in &setup.faults {
        let l = &setup.layout;
        let leaves = l.hosts.div_ceil(l.hosts_per_leaf);
        let fits = match f.link {
            Link::Host { host, plane } => host < l.hosts && plane < l.planes,
            Link::Pair { plane, leaf, spine } => {
                plane < l.planes && leaf < leaves && spine < l.spines
            }
            Link::Spine { plane, spine } => plane < l.planes && spine < l.spines,
            Link::Plane(p) => p < l.planes,
            Link::All => true,
        };
        if !fits {
            return Err(format!("fault: {:?} is not there", f.link));
        }
    }
    Ok(setup)
}

/// `at`, `link` ("host 3", "leaf 0 spine 2", "spine 1", "plane 2", "all"; "plane 1 spine 2" for
/// others than plane 0), and one of `up`, `loss`, `rate`.
fn fault(s: &Section) -> Result<Fault, String> {
    let text = s.one("link").ok_or("fault: link is missing")?;
    let words: Vec<&str> = text.split_whitespace().collect();
    let find = |name: &str| -> Result<Option<usize>, String> {
        match words.iter().position(|w| *w == name) {
            None => Ok(None),
            Some(i) => words
                .get(i + 1)
                .and_then(|n| n.parse().ok())
                .map(Some)
                .ok_or_else(|| format!("fault: {text:?}: {name} has no number")),
        }
    };
    let plane = find("plane")?;
    let p = plane.unwrap_or(0);
    let link = match (find("host")?, find("leaf")?, find("spine")?) {
        (Some(host), _, _) => Link::Host { host, plane: p },
        (_, Some(leaf), Some(spine)) => Link::Pair {
            plane: p,
            leaf,
            spine,
        },
        (_, _, Some(spine)) => Link::Spine { plane: p, spine },
        _ if words == ["all"] => Link::All,
        _ => Link::Plane(plane.ok_or_else(|| format!("fault: {text:?} names no link"))?),
    };
    let change = if let Some(up) = s.one("up") {
        Change::Alive(up == "true")
    } else if let Some(l) = s.one("loss") {
        Change::Loss(number(l)?)
    } else if let Some(r) = s.one("rate") {
        Change::Rate(rate(r)?)
    } else {
        return Err("fault: one of up, loss and rate is needed".into());
    };
    Ok(Fault {
        at: time(s.one("at").unwrap_or("0s"))? as Ps,
        link,
        change,
    })
}
