//! A bar per class of ranks.

use std::fmt::Write;

use super::{GIB, legend};
use crate::{Memory, Question, Strategy};

const PARTS: [(&str, &str); 6] = [
    ("c1", "parameters"),
    ("c2", "gradients"),
    ("c3", "optimiser"),
    ("c4", "activations"),
    (
        "c5",
        "for a moment: gathered, computed again, logits, messages",
    ),
    ("c6", "driver, libraries, fragmentation"),
];

const fn parts(memory: &Memory) -> [f64; 6] {
    let states = &memory.states;
    [
        states.parameters,
        states.gradients,
        states.optimizer,
        memory.activations + memory.embedding,
        states.gathered + memory.computed_again + memory.logits + memory.buffers,
        memory.overhead,
    ]
}

pub(super) fn draw(page: &mut String, question: &Question, strategy: &Strategy) {
    let room = question.cluster.accelerator.memory.value;
    let all = question.memories(strategy);
    let widest = all.iter().map(Memory::total).fold(room, f64::max);
    page.push_str("<div class=\"panel\">\n");
    for memory in &all {
        let name = memory.class.name();
        let _ = write!(
            page,
            "<div class=\"row\"><span>{name}</span><div class=\"bar\">"
        );
        for ((colour, what), bytes) in PARTS.iter().zip(parts(memory)) {
            let _ = write!(
                page,
                "<i style=\"width:{:.2}%;background:var(--{colour})\" title=\"{what}: {:.1} GiB\"></i>",
                100.0 * bytes / widest,
                bytes / GIB
            );
        }
        let total = memory.total() / GIB;
        let _ = writeln!(
            page,
            "</div><span class=\"value\">{total:.1} GiB</span></div>"
        );
    }
    let mut entries = PARTS.to_vec();
    entries.push(("track", "free"));
    legend(page, &entries);
    page.push_str("</div>\n");
}
