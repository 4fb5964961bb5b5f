//! Event recording and trace reports.
//!
//! Every rank has one [`Ledger`], its flight recorder. The code that issues collectives, spans, operators and
//! allocations records them there. Traces, communication volumes, hang reports and the planner's dry run all
//! read it.
//!
//! ```
//! use trainyard_trace::{Ledger, SpanKind};
//!
//! let ledger = Ledger::recording(0);
//! {
//!     let _step = ledger.enter(SpanKind::Step, "step 1");
//!     let _forward = ledger.enter(SpanKind::Forward, "forward");
//! }
//! assert_eq!(ledger.events().spans.len(), 2);
//! ```

mod calls;
mod chrome;
mod clock;
mod collective;
mod device_clock;
mod error;
mod events;
mod flops;
mod interval_set;
mod kernel_bytes;
mod ledger;
mod memory;
mod memory_chart;
mod memory_history;
mod memory_page;
mod named_enum;
mod operator;
mod purpose;
mod pytorch;
mod readable;
mod self_time;
mod span;
mod summary;
mod table;
mod ticks;
mod timeline;
mod totals;
mod trace_file;
mod volume;

pub use calls::{Calls, calls};
pub use chrome::{chrome_file_name, read_chrome, write_chrome};
pub use clock::now_ns;
pub use collective::{Collective, CollectiveId, CollectiveKind};
pub use device_clock::{DeviceClock, DeviceInterval, DevicePoint, OnDevice};
pub use error::TraceError;
pub use events::Events;
pub use flops::flops;
pub use interval_set::IntervalSet;
pub use kernel_bytes::KernelBytes;
pub use ledger::{CollectiveHandle, Ledger};
pub use memory::{Allocation, MemoryKind};
pub use memory_history::{BytesByKind, MemoryHistory, MemoryLevel};
pub use memory_page::draw_memory;
pub use operator::Operator;
pub use purpose::Purpose;
pub use pytorch::{FlightRecorder, Frame, PickleError, PytorchError, RecordedCall, diagnose};
pub use readable::{ByteUnit, counted, readable_bytes, readable_time};
pub use self_time::{SelfTime, self_times};
pub use span::{Span, SpanGuard, SpanKind, current_thread};
pub use summary::{KindSummary, RankSummary, Summary, read_all, summarize};
pub use ticks::ticks;
pub use timeline::draw_step;
pub use totals::{MemoryTotal, OperatorTotal, SpanTotal, Total, Totals};
pub use volume::{all_to_all_sent_bytes, sent_bytes};
