//! Heartbeats of ranks: hang detection, straggler detection and step-time statistics.
//!
//! Every rank writes a [`Heartbeat`] several times a second, into [memory](HeartbeatMemory) of the launcher of its node.
//! The launcher reads them with a [`HeartbeatMonitor`], decides with a [`HangDetector`] which ranks hang, and finds with [`diagnose`] which rank and
//! which collective hold up the job. [`stragglers`] names ranks that are slow without hanging.

mod detector;
mod hang;
mod heartbeat;
mod in_flight;
mod memory;
mod monitor;
mod step_time;
mod straggler;
mod training_metrics;

pub use detector::{HangDetector, HungRank, is_progress_slow, slow_progress};
pub use hang::{Hang, RankStatus, diagnose};
pub use heartbeat::{Heartbeat, MeshAxis, PendingCollective, Stage};
pub use in_flight::{CollectiveInFlight, collectives_in_flight};
pub use memory::{HEARTBEAT_OFFSET, HEARTBEATS, HeartbeatMemory, HeartbeatSlot};
pub use monitor::{HeartbeatMonitor, POLL_INTERVAL};
pub use step_time::StepTimeStats;
pub use straggler::{Straggler, stragglers};
pub use training_metrics::{MemoryUse, Save, SentBytes, StepHistogram, TrainingMetrics};
