//! A page that shows a running job, and follows it by server-sent events.
//!
//! The launcher adds to the [`Record`] of the job, and every open page asks it once a second for what is new. The page
//! is one file without external resources, so it works behind an SSH tunnel and without the Internet.

mod history;
mod prediction;
mod record;
mod state;
mod token;

pub(crate) use history::Received;
pub use prediction::Prediction;
pub(crate) use record::Record;
pub(crate) use token::Token;

/// The page. It asks for `events` with the token that it was opened with.
pub(crate) const HTML: &str = include_str!("page.html");

/// The page can load nothing, and can connect only to where it comes from.
pub(crate) const CONTENT_SECURITY_POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; \
     connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";
