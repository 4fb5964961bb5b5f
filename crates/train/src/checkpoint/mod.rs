//! A job's state, out of the tensors of all ranks and into them again.
//!
//! Every tensor's layout says which part of it a rank holds; nothing else is asked. So a state that was
//! saved on one mesh loads on any other.

mod held;
mod load;
mod newest;
mod peers;
mod save;

pub use load::{latest, load, load_opened};
pub use newest::{Newest, newest};
pub use peers::peers;
pub use save::{Destination, Saved, Saver};
