// SPDX-License-Identifier: GPL-2.0

//! Attributes of RDMA objects as plain values, loaded from and stored into the C structs.

use crate::bindings;

/// Bits of a QP attribute mask; the values of `enum ib_qp_attr_mask`.
#[allow(missing_docs)]
pub mod mask {
    pub const STATE: u32 = 1 << 0;
    pub const CUR_STATE: u32 = 1 << 1;
    pub const EN_SQD_ASYNC_NOTIFY: u32 = 1 << 2;
    pub const ACCESS_FLAGS: u32 = 1 << 3;
    pub const PKEY_INDEX: u32 = 1 << 4;
    pub const PORT: u32 = 1 << 5;
    pub const QKEY: u32 = 1 << 6;
    pub const AV: u32 = 1 << 7;
    pub const PATH_MTU: u32 = 1 << 8;
    pub const TIMEOUT: u32 = 1 << 9;
    pub const RETRY_CNT: u32 = 1 << 10;
    pub const RNR_RETRY: u32 = 1 << 11;
    pub const RQ_PSN: u32 = 1 << 12;
    pub const MAX_QP_RD_ATOMIC: u32 = 1 << 13;
    pub const ALT_PATH: u32 = 1 << 14;
    pub const MIN_RNR_TIMER: u32 = 1 << 15;
    pub const SQ_PSN: u32 = 1 << 16;
    pub const MAX_DEST_RD_ATOMIC: u32 = 1 << 17;
    pub const PATH_MIG_STATE: u32 = 1 << 18;
    pub const DEST_QPN: u32 = 1 << 20;
}

// The values above are those of the headers.
const _: () = {
    assert!(mask::AV == bindings::ib_qp_attr_mask_IB_QP_AV);
    assert!(mask::PATH_MTU == bindings::ib_qp_attr_mask_IB_QP_PATH_MTU);
    assert!(mask::SQ_PSN == bindings::ib_qp_attr_mask_IB_QP_SQ_PSN);
    assert!(mask::PATH_MIG_STATE == bindings::ib_qp_attr_mask_IB_QP_PATH_MIG_STATE);
    assert!(mask::DEST_QPN == bindings::ib_qp_attr_mask_IB_QP_DEST_QPN);
};

/// States of a QP; the values of `enum ib_qp_state`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
#[allow(missing_docs)]
pub enum QpState {
    Reset = 0,
    Init = 1,
    Rtr = 2,
    Rts = 3,
    Sqd = 4,
    Sqe = 5,
    Err = 6,
}

impl QpState {
    /// From the C value.
    pub fn from_raw(raw: u32) -> Option<Self> {
        Some(match raw {
            0 => Self::Reset,
            1 => Self::Init,
            2 => Self::Rtr,
            3 => Self::Rts,
            4 => Self::Sqd,
            5 => Self::Sqe,
            6 => Self::Err,
            _ => return None,
        })
    }
}

/// Asynchronous events of a QP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
#[allow(missing_docs)]
pub enum QpEvent {
    Fatal = bindings::ib_event_type_IB_EVENT_QP_FATAL,
    RequestError = bindings::ib_event_type_IB_EVENT_QP_REQ_ERR,
    AccessError = bindings::ib_event_type_IB_EVENT_QP_ACCESS_ERR,
    Established = bindings::ib_event_type_IB_EVENT_COMM_EST,
    Drained = bindings::ib_event_type_IB_EVENT_SQ_DRAINED,
    LastWqe = bindings::ib_event_type_IB_EVENT_QP_LAST_WQE_REACHED,
    PathChanged = bindings::ib_event_type_IB_EVENT_PATH_MIG,
}

/// What a device can do.
#[derive(Clone, Copy, Default)]
#[allow(missing_docs)]
pub struct DeviceAttr {
    pub fw_ver: u64,
    pub sys_image_guid: u64,
    pub vendor_id: u32,
    pub vendor_part_id: u32,
    pub hw_ver: u32,
    pub max_mr_size: u64,
    pub page_size_cap: u64,
    pub max_qp: u32,
    pub max_qp_wr: u32,
    pub max_sge: u32,
    pub max_cq: u32,
    pub max_cqe: u32,
    pub max_mr: u32,
    pub max_pd: u32,
    pub max_rd_atomic: u32,
    pub max_srq: u32,
    pub max_srq_wr: u32,
    pub max_pkeys: u16,
    pub local_ca_ack_delay: u8,
}

impl DeviceAttr {
    /// Stores all of it.
    pub fn store(&self, to: &mut bindings::ib_device_attr) {
        *to = bindings::ib_device_attr::default();
        to.fw_ver = self.fw_ver;
        to.sys_image_guid = self.sys_image_guid.to_be();
        to.vendor_id = self.vendor_id;
        to.vendor_part_id = self.vendor_part_id;
        to.hw_ver = self.hw_ver;
        to.max_mr_size = self.max_mr_size;
        to.page_size_cap = self.page_size_cap;
        to.max_qp = self.max_qp;
        to.max_qp_wr = self.max_qp_wr;
        to.max_send_sge = self.max_sge;
        to.max_recv_sge = self.max_sge;
        to.max_sge_rd = self.max_sge;
        to.max_cq = self.max_cq;
        to.max_cqe = self.max_cqe;
        to.max_mr = self.max_mr;
        to.max_pd = self.max_pd;
        to.max_qp_rd_atom = self.max_rd_atomic;
        to.max_qp_init_rd_atom = self.max_rd_atomic;
        to.max_res_rd_atom = self.max_rd_atomic.saturating_mul(self.max_qp);
        // Atomics are those of the CPU: other programs on the machine see them as atomic.
        to.atomic_cap = bindings::ib_atomic_cap_IB_ATOMIC_GLOB;
        to.max_srq = self.max_srq;
        to.max_srq_wr = self.max_srq_wr;
        to.max_srq_sge = self.max_sge;
        to.max_pkeys = self.max_pkeys;
        to.local_ca_ack_delay = self.local_ca_ack_delay;
        // A CQE's timestamp counts ns.
        to.hca_core_clock = 1_000_000;
        to.timestamp_mask = u64::MAX;
        to.device_cap_flags = (bindings::ib_device_cap_flags_IB_DEVICE_RC_RNR_NAK_GEN
            | bindings::ib_device_cap_flags_IB_DEVICE_SYS_IMAGE_GUID
            | bindings::ib_device_cap_flags_IB_DEVICE_PORT_ACTIVE_EVENT
            | bindings::ib_device_cap_flags_IB_DEVICE_CURR_QP_STATE_MOD
            | bindings::ib_device_cap_flags_IB_DEVICE_N_NOTIFY_CQ)
            as u64;
        to.kernel_cap_flags = u64::from(bindings::ib_kernel_cap_flags_IBK_ALLOW_USER_UNREG);
    }
}

/// The state of the port.
#[derive(Clone, Copy, Default)]
#[allow(missing_docs)]
pub struct PortAttr {
    pub active: bool,
    /// Largest packet of the wire, in bytes.
    pub netdev_mtu: u32,
    /// Greatest `enum ib_mtu` whose payload fits in.
    pub active_mtu: u32,
    pub gid_tbl_len: u32,
    pub max_msg_size: u32,
    /// Mbit/s; 0 is unknown.
    pub speed: u32,
}

impl PortAttr {
    /// Stores all of it.
    pub fn store(&self, to: &mut bindings::ib_port_attr) {
        to.state = if self.active {
            bindings::ib_port_state_IB_PORT_ACTIVE
        } else {
            bindings::ib_port_state_IB_PORT_DOWN
        };
        to.phys_state = if self.active {
            bindings::ib_port_phys_state_IB_PORT_PHYS_STATE_LINK_UP as u8
        } else {
            bindings::ib_port_phys_state_IB_PORT_PHYS_STATE_DISABLED as u8
        };
        to.max_mtu = bindings::ib_mtu_IB_MTU_4096;
        to.active_mtu = self.active_mtu as bindings::ib_mtu;
        to.phys_mtu = self.netdev_mtu;
        to.gid_tbl_len = self.gid_tbl_len as i32;
        to.pkey_tbl_len = 1;
        to.max_msg_sz = self.max_msg_size;
        to.port_cap_flags = bindings::ib_port_capability_mask_bits_IB_PORT_CM_SUP;
        to.max_vl_num = 1;
        (to.active_width, to.active_speed) = width_and_speed(self.speed);
        to.set_ip_gids(1);
    }
}

/// Lane count and lane speed (`enum ib_port_width`, `enum ib_port_speed`) of a rate in
/// Mbit/s: the slowest pair that is at least as fast. Unknown counts as 1 Gbit/s.
fn width_and_speed(rate: u32) -> (u8, u16) {
    use bindings as b;
    let x1 = b::ib_port_width_IB_WIDTH_1X as u8;
    let x4 = b::ib_port_width_IB_WIDTH_4X as u8;
    let (width, speed) = match rate {
        0..=2_500 => (x1, b::ib_port_speed_IB_SPEED_SDR),
        2_501..=5_000 => (x1, b::ib_port_speed_IB_SPEED_DDR),
        5_001..=10_000 => (x1, b::ib_port_speed_IB_SPEED_QDR),
        10_001..=25_000 => (x1, b::ib_port_speed_IB_SPEED_EDR),
        25_001..=40_000 => (x4, b::ib_port_speed_IB_SPEED_QDR),
        40_001..=50_000 => (x1, b::ib_port_speed_IB_SPEED_HDR),
        50_001..=100_000 => (x4, b::ib_port_speed_IB_SPEED_EDR),
        100_001..=200_000 => (x4, b::ib_port_speed_IB_SPEED_HDR),
        200_001..=400_000 => (x4, b::ib_port_speed_IB_SPEED_NDR),
        _ => (x4, b::ib_port_speed_IB_SPEED_XDR),
    };
    (width, speed as u16)
}

/// Memory to register.
#[derive(Clone, Copy)]
pub struct MrAttr {
    /// User address.
    pub start: u64,
    /// Bytes.
    pub length: u64,
    /// Address in the region's own address space.
    pub iova: u64,
    /// `enum ib_access_flags`.
    pub access: u32,
}

/// What a reregistration changes.
#[derive(Clone, Copy)]
pub struct MrRereg(pub u32);

impl MrRereg {
    /// The memory.
    pub fn translation(self) -> bool {
        self.0 & bindings::ib_mr_rereg_flags_IB_MR_REREG_TRANS != 0
    }

    /// The rights.
    pub fn access(self) -> bool {
        self.0 & bindings::ib_mr_rereg_flags_IB_MR_REREG_ACCESS != 0
    }
}

/// A shared receive queue.
#[derive(Clone, Copy, Default)]
pub struct SrqAttr {
    /// WRs.
    pub max_wr: u32,
    /// SGEs of a WR.
    pub max_sge: u32,
    /// The event comes when fewer WRs are left; 0 is off.
    pub limit: u32,
}

/// Sizes of a QP.
#[derive(Clone, Copy, Default)]
#[allow(missing_docs)]
pub struct QpCap {
    pub max_send_wr: u32,
    pub max_recv_wr: u32,
    pub max_send_sge: u32,
    pub max_recv_sge: u32,
    pub max_inline: u32,
}

impl QpCap {
    /// From the C struct.
    pub fn load(from: &bindings::ib_qp_cap) -> Self {
        Self {
            max_send_wr: from.max_send_wr,
            max_recv_wr: from.max_recv_wr,
            max_send_sge: from.max_send_sge,
            max_recv_sge: from.max_recv_sge,
            max_inline: from.max_inline_data,
        }
    }

    /// Into the C struct.
    pub fn store(&self, to: &mut bindings::ib_qp_cap) {
        to.max_send_wr = self.max_send_wr;
        to.max_recv_wr = self.max_recv_wr;
        to.max_send_sge = self.max_send_sge;
        to.max_recv_sge = self.max_recv_sge;
        to.max_inline_data = self.max_inline;
    }
}

/// Where a connected QP's packets go.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AddressVector {
    /// The local GID.
    pub sgid: [u8; 16],
    /// Its index in the port's table.
    pub sgid_index: u8,
    /// The remote GID.
    pub dgid: [u8; 16],
    /// Traffic class (IP TOS).
    pub traffic_class: u8,
    /// IPv6 flow label.
    pub flow_label: u32,
    /// IP TTL.
    pub hop_limit: u8,
    /// Service level.
    pub sl: u8,
    /// Rate limit of the path.
    pub static_rate: u8,
    /// Interface that the local GID belongs to (a VLAN has its own); 0 is none.
    pub ifindex: u32,
    /// It is a RoCE v2 GID.
    pub is_udp: bool,
}

/// Attributes of a QP. Which fields count, the mask says.
#[derive(Clone, Copy, Default)]
#[allow(missing_docs)]
pub struct QpAttr {
    pub state: u32,
    pub cur_state: u32,
    pub path_mtu: u32,
    pub path_mig_state: u32,
    pub rq_psn: u32,
    pub sq_psn: u32,
    pub dest_qpn: u32,
    pub access: u32,
    pub pkey_index: u16,
    pub en_sqd_async_notify: bool,
    pub sq_draining: bool,
    pub max_rd_atomic: u8,
    pub max_dest_rd_atomic: u8,
    pub min_rnr_timer: u8,
    pub port: u32,
    pub timeout: u8,
    pub retry_cnt: u8,
    pub rnr_retry: u8,
    pub has_grh: bool,
    pub av: AddressVector,
}

impl QpAttr {
    /// From the C struct.
    ///
    /// # Safety
    ///
    /// With [`mask::AV`] the GID attribute is null or valid.
    pub(super) unsafe fn load(from: &bindings::ib_qp_attr, mask: u32) -> Self {
        let mut this = Self {
            state: from.qp_state,
            cur_state: from.cur_qp_state,
            path_mtu: from.path_mtu,
            path_mig_state: from.path_mig_state,
            rq_psn: from.rq_psn,
            sq_psn: from.sq_psn,
            dest_qpn: from.dest_qp_num,
            access: from.qp_access_flags as u32,
            pkey_index: from.pkey_index,
            en_sqd_async_notify: from.en_sqd_async_notify != 0,
            sq_draining: false,
            max_rd_atomic: from.max_rd_atomic,
            max_dest_rd_atomic: from.max_dest_rd_atomic,
            min_rnr_timer: from.min_rnr_timer,
            port: from.port_num,
            timeout: from.timeout,
            retry_cnt: from.retry_cnt,
            rnr_retry: from.rnr_retry,
            has_grh: false,
            av: AddressVector::default(),
        };
        if mask & mask::AV != 0 {
            let ah = &from.ah_attr;
            this.has_grh = u32::from(ah.ah_flags) & bindings::ib_ah_flags_IB_AH_GRH != 0;
            this.av = AddressVector {
                sgid_index: ah.grh.sgid_index,
                // SAFETY: both views of a GID are plain bytes.
                dgid: unsafe { ah.grh.dgid.raw },
                traffic_class: ah.grh.traffic_class,
                flow_label: ah.grh.flow_label,
                hop_limit: ah.grh.hop_limit,
                sl: ah.sl,
                static_rate: ah.static_rate,
                ..AddressVector::default()
            };
            // SAFETY: null or valid, says the caller; the core holds it during the call.
            if let Some(gid) = unsafe { ah.grh.sgid_attr.as_ref() } {
                // SAFETY: as for the other GID.
                this.av.sgid = unsafe { gid.gid.raw };
                this.av.is_udp = gid.gid_type == bindings::ib_gid_type_IB_GID_TYPE_ROCE_UDP_ENCAP;
                // SAFETY: the GID attribute is held, and it holds its netdev until a grace
                // period after the netdev has gone; only the index is read.
                this.av.ifindex = unsafe { bindings::metaroce_gid_ifindex(gid) };
            }
        }
        this
    }

    /// Into the C struct (zeroed by the core).
    pub fn store(&self, to: &mut bindings::ib_qp_attr) {
        to.qp_state = self.state;
        to.cur_qp_state = self.cur_state;
        to.path_mtu = self.path_mtu;
        to.path_mig_state = self.path_mig_state;
        to.rq_psn = self.rq_psn;
        to.sq_psn = self.sq_psn;
        to.dest_qp_num = self.dest_qpn;
        to.qp_access_flags = self.access as i32;
        to.pkey_index = self.pkey_index;
        to.en_sqd_async_notify = u8::from(self.en_sqd_async_notify);
        to.sq_draining = u8::from(self.sq_draining);
        to.max_rd_atomic = self.max_rd_atomic;
        to.max_dest_rd_atomic = self.max_dest_rd_atomic;
        to.min_rnr_timer = self.min_rnr_timer;
        to.port_num = self.port;
        to.timeout = self.timeout;
        to.retry_cnt = self.retry_cnt;
        to.rnr_retry = self.rnr_retry;
        let ah = &mut to.ah_attr;
        ah.type_ = bindings::rdma_ah_attr_type_RDMA_AH_ATTR_TYPE_ROCE;
        ah.port_num = self.port;
        ah.sl = self.av.sl;
        ah.static_rate = self.av.static_rate;
        ah.ah_flags = if self.has_grh {
            bindings::ib_ah_flags_IB_AH_GRH as u8
        } else {
            0
        };
        ah.grh.dgid = bindings::ib_gid { raw: self.av.dgid };
        ah.grh.sgid_index = self.av.sgid_index;
        ah.grh.traffic_class = self.av.traffic_class;
        ah.grh.flow_label = self.av.flow_label;
        ah.grh.hop_limit = self.av.hop_limit;
    }
}
