//! Heartbeats of ranks: hang detection, straggler detection and step-time statistics.
//!
//! Every rank writes a [`Heartbeat`] file several times a second. The launcher of its node reads the files with a
//! [`HeartbeatMonitor`], decides with a [`HangDetector`] which ranks hang, and finds with [`diagnose`] which rank and
//! which collective hold up the job. [`stragglers`] names ranks that are slow without hanging.

mod abort;
mod detector;
mod hang;
mod heartbeat;
mod monitor;
mod step_time;
mod straggler;

pub use abort::{is_aborted, mark_aborted};
pub use detector::{HangDetector, HungRank};
pub use hang::{Hang, RankStatus, diagnose};
pub use heartbeat::{HEARTBEAT_DIR, Heartbeat, PendingCollective, Stage};
pub use monitor::{HeartbeatMonitor, POLL_INTERVAL};
pub use step_time::StepTimeStats;
pub use straggler::{Straggler, stragglers};
