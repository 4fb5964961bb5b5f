//! A job's state, out of the tensors of all ranks and into them again.
//!
//! Every tensor's layout says which part of it a rank holds; nothing else is asked. So a state that was
//! saved on one mesh loads on any other.

mod held;
mod load;
mod save;

pub use load::{latest, load};
pub use save::{Saved, Saver};
