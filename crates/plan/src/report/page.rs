//! The same as one page that needs no network.

use super::Report;

impl Report {
    /// The page.
    pub fn to_html(&self, _most: usize) -> String {
        String::new()
    }
}
