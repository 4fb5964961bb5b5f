//! Heartbeats of ranks: hang detection, straggler detection and step-time statistics.
//!
//! Every rank writes a [`Heartbeat`] several times a second, into [memory](HeartbeatMemory) of the launcher of its node.
//! The launcher reads them with a [`HeartbeatMonitor`], decides with a [`HangDetector`] which ranks hang, and finds with [`diagnose`] which rank and
//! which collective hold up the job. [`stragglers`] names ranks that are slow without hanging.

mod detector;
mod hang;
mod heartbeat;
mod memory;
mod monitor;
mod step_time;
mod straggler;

pub use detector::{HangDetector, HungRank};
pub use hang::{Hang, RankStatus, diagnose};
pub use heartbeat::{Heartbeat, PendingCollective, Stage};
pub use memory::{HEARTBEAT_OFFSET, HEARTBEATS, HeartbeatMemory, HeartbeatSlot};
pub use monitor::{HeartbeatMonitor, POLL_INTERVAL};
pub use step_time::StepTimeStats;
pub use straggler::{Straggler, stragglers};
