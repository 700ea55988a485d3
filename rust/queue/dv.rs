// SPDX-License-Identifier: GPL-2.0

//! The part of <rdma/metaroce-abi.h> that is about extensions.

use crate::bindings;
use ::kernel::transmute::{AsBytes, FromBytes};

pub use bindings::{
    metaroce_connection as ConnectionInfo, metaroce_path as Path, metaroce_qp_attr as QpAttr,
    metaroce_transition as Transition,
};

/// Transitions that a connection remembers.
pub const MAX_TRANSITIONS: usize = bindings::METAROCE_MAX_TRANSITIONS as usize;
/// QPs of a connection that listen at the most.
pub const MAX_LISTENERS: usize = bindings::METAROCE_MAX_LISTENERS as usize;
/// Planes of a device.
pub const MAX_PLANES: u32 = bindings::METAROCE_MAX_PLANES;
/// Bytes of an element of an array at the most.
pub const MAX_STRIDE: u32 = bindings::METAROCE_MAX_STRIDE;

/// Attributes of the method QUERY.
#[allow(missing_docs)] // the header documents them
pub mod query {
    use crate::bindings;
    pub const QP: u16 = bindings::metaroce_query_attrs_METAROCE_QUERY_QP as u16;
    pub const CONNECTION: u16 = bindings::metaroce_query_attrs_METAROCE_QUERY_CONNECTION as u16;
    pub const PATH_SIZE: u16 = bindings::metaroce_query_attrs_METAROCE_QUERY_PATH_SIZE as u16;
    pub const PATHS: u16 = bindings::metaroce_query_attrs_METAROCE_QUERY_PATHS as u16;
}

/// Attributes of the method MODIFY.
#[allow(missing_docs)] // the header documents them
pub mod modify {
    use crate::bindings;
    pub const QP: u16 = bindings::metaroce_modify_attrs_METAROCE_MODIFY_QP as u16;
    pub const ATTR: u16 = bindings::metaroce_modify_attrs_METAROCE_MODIFY_ATTR as u16;
}

/// Attributes of the method TRANSITIONS.
#[allow(missing_docs)] // the header documents them
pub mod transitions {
    use crate::bindings;
    pub const QP: u16 = bindings::metaroce_transitions_attrs_METAROCE_TRANSITIONS_QP as u16;
    pub const FROM: u16 = bindings::metaroce_transitions_attrs_METAROCE_TRANSITIONS_FROM as u16;
    pub const SIZE: u16 = bindings::metaroce_transitions_attrs_METAROCE_TRANSITIONS_SIZE as u16;
    pub const LIST: u16 = bindings::metaroce_transitions_attrs_METAROCE_TRANSITIONS_LIST as u16;
    pub const COUNT: u16 = bindings::metaroce_transitions_attrs_METAROCE_TRANSITIONS_COUNT as u16;
}

/// `enum metaroce_qp_attr_mask`.
#[allow(missing_docs)] // the header documents them
pub mod mask {
    use crate::bindings;
    pub const PATHS: u32 = bindings::metaroce_qp_attr_mask_METAROCE_QP_PATHS;
    pub const ORDERING: u32 = bindings::metaroce_qp_attr_mask_METAROCE_QP_ORDERING;
    pub const EVENTS: u32 = bindings::metaroce_qp_attr_mask_METAROCE_QP_EVENTS;
    pub const PLANES: u32 = bindings::metaroce_qp_attr_mask_METAROCE_QP_PLANES;
    pub const CONTROLLER: u32 = bindings::metaroce_qp_attr_mask_METAROCE_QP_CONTROLLER;
}

/// States of connections and paths.
#[allow(missing_docs)] // the header documents them
pub mod state {
    use crate::bindings as b;
    pub const CONNECTING: u32 = b::metaroce_connection_state_METAROCE_CONNECTION_CONNECTING;
    pub const UP: u32 = b::metaroce_connection_state_METAROCE_CONNECTION_UP;
    pub const CLOSING: u32 = b::metaroce_connection_state_METAROCE_CONNECTION_CLOSING;
    pub const CLOSED: u32 = b::metaroce_connection_state_METAROCE_CONNECTION_CLOSED;
    pub const FAILED: u32 = b::metaroce_connection_state_METAROCE_CONNECTION_FAILED;
    pub const PATH_GOOD: u32 = b::metaroce_path_state_METAROCE_PATH_GOOD;
    pub const PATH_SUSPECT: u32 = b::metaroce_path_state_METAROCE_PATH_SUSPECT;
    pub const PATH_FAILED: u32 = b::metaroce_path_state_METAROCE_PATH_FAILED;
}

/// `enum metaroce_controller`.
#[allow(missing_docs)] // the header documents them
pub mod controller {
    use crate::bindings as b;
    pub const DEFAULT: u32 = b::metaroce_controller_METAROCE_CONTROLLER_DEFAULT;
    pub const AIMD: u32 = b::metaroce_controller_METAROCE_CONTROLLER_AIMD;
    pub const FIXED: u32 = b::metaroce_controller_METAROCE_CONTROLLER_FIXED;
}

/// Ordering of Writes to a QP: that of `IBV_ACCESS_RELAXED_ORDERING`.
pub const ORDERING_RELAXED: u32 = bindings::metaroce_ordering_METAROCE_ORDERING_RELAXED;

// SAFETY: integers only, no padding (`abi::layout` asserts it).
unsafe impl AsBytes for ConnectionInfo {}
// SAFETY: as above.
unsafe impl AsBytes for Path {}
// SAFETY: as above.
unsafe impl AsBytes for Transition {}
// SAFETY: as above.
unsafe impl FromBytes for QpAttr {}
