//! The terms of a step as a waterfall chart.

use std::fmt::Write;

use super::{escaped, seconds};
use crate::describe_term;
use trainyard_plan::Time;

fn color(name: &str) -> &'static str {
    match name {
        "compute" => "c1",
        "recomputation" => "c3",
        "bubble" => "c6",
        "optimizer" => "c2",
        "launch" | "offload" => "c5",
        _ => "c4",
    }
}

pub(super) fn draw(page: &mut String, time: &Time) {
    page.push_str("<div class=\"panel\">\n");
    let mut before = 0.0;
    for (name, spent) in time.terms() {
        if spent <= 0.0 {
            continue;
        }
        let share = 100.0 * spent / time.likely;
        let _ = writeln!(
            page,
            "<div class=\"row wide\"><span>{}</span><div class=\"bar\"><i style=\"left:min({:.2}%,calc(100% - \
             2px));width:{share:.2}%;background:var(--{})\"></i></div><span class=\"value\">{} · {share:.1} %</span>\
             </div>",
            escaped(describe_term(name)),
            100.0 * before / time.likely,
            color(name),
            seconds(spent)
        );
        before += spent;
    }
    page.push_str("</div>\n");
}
