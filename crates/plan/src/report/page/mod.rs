//! The same as one page: the answer first, then what it is made of. It needs no network and no script.

mod followed;
mod machines;
mod memory;
mod scatter;
mod tables;
mod timeline;
mod waterfall;

use std::fmt::Write;

use super::{GIB, Report, in_words};
use crate::Plan;

const STYLE: &str = include_str!("style.css");

impl Report {
    /// The page, with the first plans in its table.
    pub fn to_html(&self, most: usize) -> String {
        let mut page = format!(
            "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
             <title>Plan: {}</title>\n<style>\n{STYLE}</style></head><body><main>\n",
            escaped(&self.question.shape.name)
        );
        let _ = writeln!(page, "<h1>{}</h1>", escaped(&self.heading()));
        match self.best() {
            Some(best) => self.answer(&mut page, best, most),
            None => self.refusal(&mut page),
        }
        tables::figures(&mut page, self);
        page.push_str(
            "<footer>Made by <code>trainyard plan</code>. Predictions, not measurements.",
        );
        page.push_str("</footer>\n</main></body></html>\n");
        page
    }

    fn answer(&self, page: &mut String, best: &Plan, most: usize) {
        headline(page, best);
        self.cards(page, best);
        self.reasons(page);
        let what = "Bytes on one GPU of every kind of rank, against what it has.";
        section(page, "What fills the memory", what);
        memory::draw(page, &self.question, &best.strategy);
        if !self.dry_runs.is_empty() {
            let what = "The first plans in our own words: bytes of tensors by formula, and by a dry run of the code.";
            section(page, "Formulas beside the code", what);
            followed::draw(page, self);
        }
        let what = "Each part of a step begins where the one above ends. What is hidden behind computing is not \
                    shown: these are the seconds that are paid.";
        section(page, "Where the time goes", what);
        waterfall::draw(page, &best.time);
        if best.strategy.degrees.pp > 1 {
            timeline::draw(page, &self.question, best);
        }
        let what = "Ranks are numbered through the innermost axis first, so neighbours talk most.";
        section(page, "The mesh on the machines", what);
        machines::draw(page, &self.question.cluster, &best.strategy.degrees);
        let what = "The fastest plan of every mesh, and those that no other beats in both time and memory.";
        section(page, "Time against memory", what);
        scatter::draw(page, self);
        section(
            page,
            "The best plans",
            "The fastest of every mesh that fits.",
        );
        tables::plans(page, self, most);
    }

    fn refusal(&self, page: &mut String) {
        page.push_str("<p class=\"mesh\">Nothing fits</p>\n");
        self.reasons(page);
        if let Err(Some(miss)) = &self.why {
            let what = "Bytes on one GPU of the nearest miss; the bar ends where the GPU's memory would have to.";
            section(page, "What fills the memory", what);
            memory::draw(page, &self.question, &miss.plan.strategy);
        }
    }

    fn cards(&self, page: &mut String, best: &Plan) {
        let time = &best.time;
        let room = self.question.cluster.accelerator.memory.value;
        let cards = [
            (
                seconds(time.likely),
                format!("a step; {} to {}", seconds(time.low), seconds(time.high)),
            ),
            (
                format!("{:.1} GiB", best.memory.total() / GIB),
                format!(
                    "of {:.0}, fullest: {}",
                    room / GIB,
                    best.memory.class.name()
                ),
            ),
            (
                format!("{:.1} %", 100.0 * self.utilization(best)),
                "of the peak in model operations (MFU)".to_owned(),
            ),
            (
                format!("{:.0}", self.tokens_per_second(best)),
                "tokens per second and GPU".to_owned(),
            ),
        ];
        page.push_str("<div class=\"cards\">\n");
        for (value, what) in cards {
            let _ = writeln!(
                page,
                "<div class=\"card\"><b>{value}</b><span>{what}</span></div>"
            );
        }
        page.push_str("</div>\n");
    }

    fn reasons(&self, page: &mut String) {
        page.push_str("<div class=\"why\">\n");
        for sentence in self.sentences() {
            let _ = writeln!(page, "<p>{}</p>", escaped(&sentence));
        }
        page.push_str("</div>\n");
    }
}

fn headline(page: &mut String, best: &Plan) {
    let words = in_words(best);
    let (mesh, rest) = words.split_once(", ").unwrap_or((&words, ""));
    let axes: Vec<String> = best
        .strategy
        .degrees
        .axes()
        .into_iter()
        .filter(|(_, size)| *size > 1)
        .map(|(axis, size)| format!("{axis} {size}"))
        .collect();
    let mesh = match axes.is_empty() {
        true => mesh.to_owned(),
        false => axes.join(" × "),
    };
    let _ = writeln!(
        page,
        "<p class=\"mesh\">{}</p>\n<p class=\"how\">{}</p>",
        escaped(&mesh),
        escaped(rest)
    );
}

fn section(page: &mut String, title: &str, what: &str) {
    let _ = writeln!(page, "<h2>{title}</h2>\n<p class=\"note\">{what}</p>");
}

/// Seconds with as many digits as say something.
fn seconds(value: f64) -> String {
    match value {
        v if v >= 100.0 => format!("{v:.0} s"),
        v if v >= 1.0 => format!("{v:.2} s"),
        v if v >= 0.1 => format!("{v:.3} s"),
        v => format!("{:.1} ms", v * 1e3),
    }
}

fn legend(page: &mut String, entries: &[(&str, &str)]) {
    page.push_str("<div class=\"legend\">");
    for (colour, name) in entries {
        let _ = write!(
            page,
            "<span><i style=\"background:var(--{colour})\"></i>{name}</span>"
        );
    }
    page.push_str("</div>\n");
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
}
