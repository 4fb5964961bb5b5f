//! Pipeline schedules as data: the actions of every rank, decided before anything runs.
//!
//! A model is split into stages, a batch into micro-batches. A [`Schedule`] lists the [`Action`]s of every rank
//! in order; their times follow from their dependencies. So a schedule can be checked ([`Schedule::check`]),
//! timed under given costs ([`simulate`]) and drawn without a model. [`Schedule::program`] adds send/recv,
//! unshard/reshard and gradient reduction, and leaves the executor nothing to decide.
//!
//! ```
//! use trainyard_schedule::{Costs, ScheduleKind, simulate};
//!
//! let schedule = ScheduleKind::OneForwardOneBackward.build(4, 8, 1)?;
//! let timeline = simulate(&schedule, &Costs::uniform(1.0, 1.0, 1.0))?;
//! assert_eq!(timeline.bubble(), 3.0 * (1.0 + 2.0)); // (ranks - 1) · (forward + backward)
//! assert_eq!(timeline.max_in_flight(), [4, 3, 2, 1]);
//! # Ok::<(), trainyard_schedule::ScheduleError>(())
//! ```

mod action;
mod check;
mod closed_form;
mod csv;
mod draw;
mod error;
mod held;
mod kind;
mod make;
mod measured;
mod program;
mod schedule;
mod simulate;

pub use action::{Action, ComputeType, Task};
pub use closed_form::{StageTime, bubble, in_flight, zero_bubble_h1};
pub use draw::to_svg;
pub use error::ScheduleError;
pub use held::StageHeld;
pub use kind::ScheduleKind;
pub use program::{GradReduction, Instruction, Message, Program, ShardingPolicy};
pub use schedule::Schedule;
pub use simulate::{Costs, Span, Timeline, simulate};
