// SPDX-License-Identifier: GPL-2.0
//! Set-up: versions, names, limits, GIDs, attributes, things that are not supported.

#![forbid(unsafe_code)]

use crate::Run;
use selftests::args::{self, Args};
use selftests::endpoint::{Device, Endpoint, Tuning, ALL_ACCESS};
use selftests::ktap::Outcome;
use selftests::single::Single;
use selftests::sys::{self, errno, errno_name, Memory};
use selftests::verbs::{self, Context, QpInit, SendWr};
use selftests::{check, fail, skip};
use std::io::Write;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

fn s(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// Runs a command; its output as text when it fails.
pub fn run_command(words: &[&str]) -> Result<(), String> {
    let [program, arguments @ ..] = words else { return Err("no command".into()) };
    let output = Command::new(program).args(arguments).output().map_err(|e| format!("{program}: {e}"))?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!(
        "'{}' ended with {}: {}",
        words.join(" "),
        output.status,
        String::from_utf8_lossy(&output.stderr).trim()
    ))
}

/// Asks the kernel for a context as a provider that speaks ABI versions `low` to `high`; 0 or an errno.
fn get_context(node: &str, low: u32, high: u32) -> Result<i32, String> {
    // struct ib_uverbs_cmd_hdr, struct ib_uverbs_get_context, struct metaroce_alloc_ucontext_req,
    // as the write interface of the uverbs device wants them; the answer goes to `answer`.
    let answer = Memory::new(4096).map_err(s)?;
    let mut file = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open(format!("/dev/infiniband/{node}"))
        .map_err(|e| format!("/dev/infiniband/{node}: {e}"))?;
    const GET_CONTEXT: u32 = 0;
    let mut bytes = Vec::new();
    let words_in = (8 + 8 + 16) / 4u16;
    let words_out = (8 + 16) / 4u16;
    bytes.extend(GET_CONTEXT.to_ne_bytes());
    bytes.extend(words_in.to_ne_bytes());
    bytes.extend(words_out.to_ne_bytes());
    bytes.extend(answer.addr().to_ne_bytes());
    bytes.extend(low.to_ne_bytes());
    bytes.extend(high.to_ne_bytes());
    bytes.extend(0u64.to_ne_bytes());
    // The kernel takes a command whole or not at all; write_all could send a piece as a command.
    match file.write(&bytes) {
        Ok(taken) if taken < bytes.len() => Err(format!("{taken} of {} bytes were taken", bytes.len())),
        Ok(_) => Ok(0),
        Err(e) => Ok(e.raw_os_error().unwrap_or(-1)),
    }
}

/// Provider and module agree on a version, or the kernel refuses with EPROTO.
pub fn abi_versions(run: &Run, ep: &Endpoint) -> Outcome {
    if !ep.leads {
        return Ok(());
    }
    if run.kind != "metaroce" {
        skip!("speaks to the metaroce module directly");
    }
    let node = ep.context.node();
    // The version in use here is in the range that the plugin asks for.
    let fits = (1..64).find(|v| get_context(&node, *v, *v) == Ok(0));
    let Some(fits) = fits else { fail!("no single ABI version from 1 to 63 is accepted") };
    let wide = get_context(&node, fits, 1000)?;
    check!(wide == 0, "a range that begins with version {fits} was refused: {}", errno_name(wide));
    for (what, low, high) in [("too new", 1000, 1001), ("too old", 0, 0), ("backward", fits + 1, fits - 1)] {
        let code = get_context(&node, low, high)?;
        check!(code > 0, "a provider that is {what} ({low} to {high}) was accepted");
        // The plugin knows by this errno that it is about versions, and says which side is too old.
        let due = if high < low { errno::EINVAL } else { errno::EPROTO };
        check!(code == due, "a provider that is {what}: {} instead of {}", errno_name(code), errno_name(due));
    }
    Ok(())
}

/// The plugin finds its device under any name.
pub fn renamed_device(run: &Run, ep: &Endpoint) -> Outcome {
    if !ep.leads {
        return Ok(());
    }
    let old = ep.context.name.clone();
    let new = "roce4711";
    if let Err(error) = run_command(&["rdma", "dev", "set", &old, "name", new]) {
        skip!("{error}");
    }
    // By a process of its own: libibverbs remembers the devices that it has seen.
    let program = std::env::current_exe().map_err(s)?;
    let opened = Command::new(program).args(["--child-open", "--dev", new]).output();
    let back = run_command(&["rdma", "dev", "set", new, "name", &old]);
    let opened = opened.map_err(s)?;
    check!(
        opened.status.success(),
        "a device named {new} cannot be opened: {}",
        String::from_utf8_lossy(&opened.stdout).trim()
    );
    back?;
    let _ = run;
    Ok(())
}

/// The part of `renamed_device` that opens the device.
pub fn child_open(mut args: Args) -> i32 {
    let device = Device::from_args(&mut args);
    match Context::open(device.name.as_deref()).and_then(|context| context.query_device()) {
        Ok(_) => 0,
        Err(error) => {
            println!("{error}");
            1
        }
    }
}

/// Locked memory is limited: ENOMEM, and what is within the limit works.
pub fn memlock(_run: &Run, ep: &Endpoint) -> Outcome {
    if !ep.leads {
        return Ok(());
    }
    let program = std::env::current_exe().map_err(s)?;
    let output = Command::new("setpriv")
        .args(["--bounding-set", "-ipc_lock", "--inh-caps", "-ipc_lock"])
        .arg(program)
        .args(["--child-memlock", "--dev", &ep.context.name])
        .output();
    let output = match output {
        Ok(output) => output,
        Err(e) => skip!("setpriv (util-linux) does not start: {e}"),
    };
    let text =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    match output.status.code() {
        Some(0) => Ok(()),
        Some(4) => skip!("{}", text.trim()),
        _ => fail!("{} {}", output.status, text.trim()),
    }
}

/// The part of `memlock` without CAP_IPC_LOCK.
pub fn child_memlock(mut args: Args) -> i32 {
    let device = Device::from_args(&mut args);
    let check = || -> Result<(), String> {
        let context = Context::open(device.name.as_deref()).map_err(s)?;
        let pd = context.alloc_pd().map_err(s)?;
        let memory = Arc::new(Memory::new(4 << 20).map_err(s)?);
        sys::set_memlock(256 << 10).map_err(s)?;
        let code = pd.try_reg_mr(memory.addr(), 4 << 20, ALL_ACCESS);
        if code != errno::ENOMEM {
            return Err(format!(
                "reg_mr of 4 MiB with 256 KiB allowed: {}",
                if code == 0 { "worked".into() } else { errno_name(code) }
            ));
        }
        // A failure takes nothing with it: the allowed size works again and again.
        for round in 0..50 {
            let code = pd.try_reg_mr(memory.addr(), 128 << 10, ALL_ACCESS);
            if code != 0 {
                return Err(format!(
                    "reg_mr of 128 KiB with 256 KiB allowed, round {round}: {}",
                    errno_name(code)
                ));
            }
            pd.try_reg_mr(memory.addr(), 4 << 20, ALL_ACCESS);
        }
        // A CQ works, or fails with the same errno.
        if let Err(e) = context.create_cq(1 << 14, None) {
            if e.raw_os_error() != Some(errno::ENOMEM) {
                return Err(format!("create_cq: {e}"));
            }
        }
        Ok(())
    };
    match check() {
        Ok(()) => 0,
        Err(error) => {
            println!("{error}");
            1
        }
    }
}

/// A connection over a RoCE v2 GID of each class: IPv4 and link-local IPv6, and of a global IPv6
/// address where the interface has one; without IPv6 in the kernel, IPv4 alone.
pub fn every_gid(run: &Run, ep: &Endpoint) -> Outcome {
    let class = |gid: &[u8; 16]| match gid {
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, ..] => 1u64,
        [0xfe, 0x80, ..] => 2,
        _ => 3,
    };
    let gids: Vec<(u32, [u8; 16])> = ep
        .context
        .gids()
        .map_err(s)?
        .into_iter()
        .filter(|(_, kind, gid)| *kind == verbs::IBV_GID_TYPE_ROCE_V2 && gid.iter().any(|b| *b != 0))
        .map(|(index, _, gid)| (index, gid))
        .collect();
    let own: Vec<u64> = [1, 2, 3].into_iter().filter(|c| gids.iter().any(|(_, g)| class(g) == *c)).collect();
    let due: &[u64] = match (Path::new("/proc/sys/net/ipv6").exists(), args::env::<String>("ADDR6")) {
        (false, _) => &[1],
        (true, None) => &[1, 2],
        (true, Some(_)) => &[1, 2, 3],
    };
    let theirs = ep.oob().exchange(&own).map_err(s)?;
    check!(due.iter().all(|c| own.contains(c)), "classes of GIDs {own:?}, {due:?} are due; GIDs {gids:x?}");
    let common: Vec<u64> = own.into_iter().filter(|c| theirs.contains(c)).collect();
    check!(due.iter().all(|c| common.contains(c)), "the other end has classes {theirs:?}, {due:?} are due");
    for c in common.iter().copied() {
        let what = ["", "IPv4", "link-local IPv6", "IPv6"][c as usize];
        let Some((index, gid)) = gids.iter().find(|(_, g)| class(g) == c) else { continue };
        let cq = ep.cq(16).map_err(s)?;
        let qp = ep.qp(&QpInit::rc(&cq, &cq, 8, 1, 0)).map_err(s)?;
        let mr = ep.memory(65536, ALL_ACCESS).map_err(s)?;
        let remote = ep.exchange_memory(&[&mr]).map_err(s)?[0];
        let mut connect = *ep.plan(&[qp.clone()], &Tuning::default()).map_err(s)?.first().ok_or("no plan")?;
        let words = |g: &[u8; 16]| {
            [
                u64::from_be_bytes(g[..8].try_into().unwrap_or([0; 8])),
                u64::from_be_bytes(g[8..].try_into().unwrap_or([0; 8])),
            ]
        };
        let peer = ep.oob().exchange(&words(gid)).map_err(s)?;
        connect.gid[..8].copy_from_slice(&peer[0].to_be_bytes());
        connect.gid[8..].copy_from_slice(&peer[1].to_be_bytes());
        connect.gid_index = *index as u8;
        qp.to_rtr(&connect).map_err(|e| format!("{what}: RTR: {e}"))?;
        qp.to_rts(&connect).map_err(|e| format!("{what}: RTS: {e}"))?;
        ep.barrier("connected").map_err(s)?;
        mr.memory.fill(0, 20_000, c + u64::from(ep.leads));
        let wr = SendWr {
            sges: vec![mr.sge(0, 20_000)],
            opcode: verbs::IBV_WR_RDMA_WRITE,
            remote_addr: remote.addr + 30_000,
            rkey: remote.rkey,
            ..SendWr::default()
        };
        // The QP stays until the other end is through as well.
        let single = Single { qp };
        single.run(ep, &format!("Write over {what}"), wr)?;
        ep.barrier("written").map_err(s)?;
        mr.memory
            .verify(30_000, 20_000, c + u64::from(!ep.leads))
            .map_err(|e| format!("Write over {what}: {e}"))?;
    }
    if ep.leads {
        let names: Vec<&str> =
            common.iter().map(|c| ["", "IPv4", "link-local IPv6", "IPv6"][*c as usize]).collect();
        selftests::ktap::note(&format!("classes of GIDs: {}", names.join(", ")));
    }
    let _ = run;
    Ok(())
}

/// Attributes that programs look at are there and true.
pub fn attributes(run: &Run, ep: &Endpoint) -> Outcome {
    let (d, p) = (&ep.device, &ep.port);
    let mut wrong = Vec::new();
    let mut must = |name: &str, good: bool| {
        if !good {
            wrong.push(name.to_string());
        }
    };
    must("node_guid is zero", d.node_guid != 0);
    must("sys_image_guid is zero", d.sys_image_guid != 0);
    must("vendor_id is zero", d.vendor_id != 0);
    must("max_mr_size is below 4 GiB", d.max_mr_size > 4 << 30);
    must("page_size_cap is zero", d.page_size_cap != 0);
    for (name, value) in [
        ("max_qp", d.max_qp),
        ("max_qp_wr", d.max_qp_wr),
        ("max_sge", d.max_sge),
        ("max_cq", d.max_cq),
        ("max_cqe", d.max_cqe),
        ("max_mr", d.max_mr),
        ("max_pd", d.max_pd),
        ("max_qp_rd_atom", d.max_qp_rd_atom),
        ("max_qp_init_rd_atom", d.max_qp_init_rd_atom),
        ("max_res_rd_atom", d.max_res_rd_atom),
        ("max_srq", d.max_srq),
        ("max_srq_wr", d.max_srq_wr),
        ("max_srq_sge", d.max_srq_sge),
        ("phys_port_cnt", i32::from(d.phys_port_cnt)),
        ("max_pkeys", i32::from(d.max_pkeys)),
        ("gid_tbl_len", p.gid_tbl_len),
        ("pkey_tbl_len", i32::from(p.pkey_tbl_len)),
        ("active_speed", i32::from(p.active_speed)),
        ("active_width", i32::from(p.active_width)),
        ("max_msg_sz", i32::from(p.max_msg_sz != 0)),
    ] {
        must(&format!("{name} is {value}"), value > 0);
    }
    must("the port is not ACTIVE", p.state == verbs::IBV_PORT_ACTIVE);
    must("the link layer is not Ethernet", p.link_layer == verbs::IBV_LINK_LAYER_ETHERNET as u8);
    must("active_mtu is above max_mtu", p.active_mtu <= p.max_mtu);
    must("active_mtu is no MTU", (verbs::IBV_MTU_256..=verbs::IBV_MTU_4096).contains(&p.active_mtu));
    let devices = verbs::devices().map_err(s)?;
    let mut guids: Vec<u64> = devices.iter().map(|(_, guid)| *guid).collect();
    guids.sort_unstable();
    guids.dedup();
    must("two devices share a node GUID", guids.len() == devices.len());
    if run.kind == "metaroce" {
        // The mark by which udev knows the devices of this driver.
        let guid = u64::from_be(d.node_guid);
        must(&format!("node GUID {guid:#018x} lacks the mark"), ep.is_metaroce());
        let cq = ep.cq(4).map_err(s)?;
        let qp = ep
            .qp(&QpInit::rc(&cq, &cq, 4, 1, 236))
            .map_err(|e| format!("a QP with 236 bytes of inline data: {e}"))?;
        must("max_inline_data is below 236", qp.cap.max_inline_data >= 236);
        must("data is promised to come in order", !qp.data_in_order(verbs::IBV_WR_RDMA_WRITE));
    }
    check!(wrong.is_empty(), "{}", wrong.join("\n"));
    Ok(())
}

/// What is not supported says EOPNOTSUPP; what is beyond a limit or makes no sense, EINVAL; memory
/// that is not there, EFAULT.
pub fn unsupported(_run: &Run, ep: &Endpoint) -> Outcome {
    if !ep.leads {
        return Ok(());
    }
    let mut wrong = Vec::new();
    // The first errno is the one that is due; other drivers have others.
    let mut step = |name: &str, code: i32, allowed: &[i32]| {
        let due = if ep.is_metaroce() { &allowed[..1] } else { allowed };
        if !due.contains(&code) {
            let found = if code == 0 { "it worked".to_string() } else { errno_name(code) };
            let due: Vec<String> = due.iter().map(|c| errno_name(*c)).collect();
            wrong.push(format!("{name}: {found} instead of {}", due.join(" or ")));
        }
    };
    let not = errno::EOPNOTSUPP;
    step("reg_dmabuf_mr with a bad descriptor", ep.pd.try_reg_dmabuf_mr(-1), &[not, errno::EBADF]);
    step(
        "create_cq_ex with unknown flags",
        ep.context.try_create_cq_ex(0, 1, 1 << 30),
        &[not, errno::EINVAL],
    );
    step(
        "create_cq_ex with an unknown comp_mask",
        ep.context.try_create_cq_ex(0, 1 << 30, 0),
        &[not, errno::EINVAL],
    );
    step(
        "create_cq_ex with unknown wc flags",
        ep.context.try_create_cq_ex(1 << 62, 0, 0),
        &[not, errno::EINVAL],
    );
    let cq = ep.cq(16).map_err(s)?;
    for (name, kind) in [("a UC QP", verbs::IBV_QPT_UC), ("a raw packet QP", verbs::IBV_QPT_RAW_PACKET)] {
        let init = QpInit { kind, ..QpInit::rc(&cq, &cq, 4, 1, 0) };
        let code = match ep.pd.create_qp(&init) {
            // Another device may well offer it.
            Ok(_) if !ep.is_metaroce() => not,
            Ok(_) => 0,
            Err(e) => e.raw_os_error().unwrap_or(-1),
        };
        step(name, code, &[not, errno::EINVAL]);
    }
    let qp = ep.qp(&QpInit::rc(&cq, &cq, 4, 1, 0)).map_err(s)?;
    step("set_ece", qp.try_set_ece(0x1234, 1), &[not]);
    // Above the advertised limits.
    let attr = &ep.device;
    let above = |value: i32| u32::try_from(value).unwrap_or(0).saturating_add(1);
    let refuse = |init: &QpInit| match ep.pd.create_qp(init) {
        Ok(_) => 0,
        Err(e) => e.raw_os_error().unwrap_or(-1),
    };
    let base = || QpInit::rc(&cq, &cq, 4, 1, 0);
    let mut init = base();
    init.cap.max_send_wr = above(attr.max_qp_wr);
    step("max_send_wr above max_qp_wr", refuse(&init), &[errno::EINVAL, errno::ENOMEM]);
    let mut init = base();
    init.cap.max_send_sge = above(attr.max_sge);
    step("max_send_sge above max_sge", refuse(&init), &[errno::EINVAL]);
    let mut init = base();
    init.cap.max_inline_data = 1 << 20;
    step("a MiB of inline data", refuse(&init), &[errno::EINVAL, errno::ENOMEM]);
    let code = ep.cq(above(attr.max_cqe)).map_or_else(|e| e.raw_os_error().unwrap_or(-1), |_| 0);
    step("a CQ above max_cqe", code, &[errno::EINVAL, errno::ENOMEM]);
    let code =
        ep.pd.create_srq(above(attr.max_srq_wr), 1).map_or_else(|e| e.raw_os_error().unwrap_or(-1), |_| 0);
    step("an SRQ above max_srq_wr", code, &[errno::EINVAL, errno::ENOMEM]);
    // Memory that is not there.
    step(
        "reg_mr of unmapped memory",
        ep.pd.try_reg_mr(4096, 1 << 20, verbs::IBV_ACCESS_LOCAL_WRITE),
        &[errno::EFAULT],
    );
    step(
        "reg_mr around the end of the address space",
        ep.pd.try_reg_mr(u64::MAX - 4095, 8192, verbs::IBV_ACCESS_LOCAL_WRITE),
        &[errno::EINVAL, errno::EFAULT],
    );
    let memory = Memory::new(4096).map_err(s)?;
    step(
        "remote write without local write",
        ep.pd.try_reg_mr(memory.addr(), 4096, verbs::IBV_ACCESS_REMOTE_WRITE),
        &[errno::EINVAL],
    );
    check!(wrong.is_empty(), "{}", wrong.join("\n"));
    Ok(())
}

/// Optional access flags are ignored, not refused; traffic works under them.
pub fn optional_access(_run: &Run, ep: &Endpoint) -> Outcome {
    let memory = Memory::new(4096).map_err(s)?;
    for bit in 20..30 {
        let code = ep.pd.try_reg_mr(memory.addr(), 4096, ALL_ACCESS | 1 << bit);
        // libibverbs keeps flags from kernels that do not know them; the kernel must not refuse.
        check!(code == 0, "reg_mr with optional access flag {bit}: {}", errno_name(code));
    }
    let single = Single::new(ep, &Tuning::default(), 8, 1, 0)?;
    let mr = ep.memory(65536, ALL_ACCESS | verbs::IBV_ACCESS_RELAXED_ORDERING).map_err(s)?;
    let remote = ep.exchange_memory(&[&mr]).map_err(s)?[0];
    mr.memory.fill(0, 20_000, u64::from(ep.leads));
    let wr = SendWr {
        sges: vec![mr.sge(0, 20_000)],
        opcode: verbs::IBV_WR_RDMA_WRITE,
        remote_addr: remote.addr + 30_000,
        rkey: remote.rkey,
        ..SendWr::default()
    };
    single.run(ep, "Write between relaxed regions", wr)?;
    ep.barrier("written").map_err(s)?;
    mr.memory.verify(30_000, 20_000, u64::from(!ep.leads)).map_err(s)?;
    Ok(())
}

/// After `rdma link add` the GIDs are there and the port is ACTIVE, at once or by an event.
pub fn ready_after_add(run: &Run, ep: &Endpoint) -> Outcome {
    if !ep.leads {
        return Ok(());
    }
    let Some(netdev) = &run.netdev else { skip!("--netdev is not given") };
    let name = ep.context.name.clone();
    let before = ep.context.gids().map_err(s)?.len();
    if let Err(error) = run_command(&["rdma", "link", "delete", &name]) {
        skip!("{error}");
    }
    let added = Instant::now();
    if let Err(error) = run_command(&["rdma", "link", "add", &name, "type", &run.kind, "netdev", netdev]) {
        if run.kind != "metaroce" {
            skip!("{error}");
        }
        fail!("{error}");
    }
    // Until libibverbs sees the device node.
    let mut opened = None;
    sys::busywait(ep.wait, || {
        opened = Context::open(Some(&name)).ok();
        opened.is_some()
    });
    let Some(context) = opened else { fail!("{name} cannot be opened after rdma link add") };
    let mut events = Vec::new();
    loop {
        let active = context.query_port(1).map_err(s)?.state == verbs::IBV_PORT_ACTIVE;
        let gids = context.gids().map_err(s)?.len();
        if active && gids >= before.min(1) && (gids >= before || !events.is_empty()) {
            break;
        }
        match context.next_event(Duration::from_secs(5)).map_err(s)? {
            Some((kind, _)) => events.push(verbs::event_name(kind)),
            None => fail!(
                "5 s after rdma link add: port active {active}, {gids} of {before} GIDs, events {events:?}"
            ),
        }
    }
    selftests::ktap::note(&format!(
        "ready {} ms after rdma link add, events {events:?}",
        added.elapsed().as_millis()
    ));
    Ok(())
}
