//! Peak memory: one bar per class of ranks.

use std::fmt::Write;

use super::{GIB, legend};
use trainyard_plan::{Memory, PlanRequest, Strategy};

const TERMS: [(&str, &str); 6] = [
    ("c1", "parameters"),
    ("c2", "gradients"),
    ("c3", "optimizer states"),
    ("c4", "activations"),
    (
        "c5",
        "temporary: gathered parameters, recomputation, logits, buffers",
    ),
    ("c6", "overhead: driver context, libraries, fragmentation"),
];

const fn terms(memory: &Memory) -> [f64; 6] {
    let states = &memory.states;
    [
        states.parameters,
        states.gradients,
        states.optimizer + states.outer,
        memory.activations + memory.embedding,
        states.gathered + memory.backward + memory.logits + memory.buffers,
        memory.overhead.total(),
    ]
}

pub(super) fn draw(page: &mut String, request: &PlanRequest, strategy: &Strategy) {
    let capacity = request.cluster.accelerator.memory.value;
    let all = request.memories(strategy);
    let widest = all.iter().map(Memory::total).fold(capacity, f64::max);
    page.push_str("<div class=\"panel\">\n");
    for memory in &all {
        let name = memory.class.name();
        let _ = write!(
            page,
            "<div class=\"row\"><span>{name}</span><div class=\"bar\">"
        );
        for ((color, what), bytes) in TERMS.iter().zip(terms(memory)) {
            let _ = write!(
                page,
                "<i style=\"width:{:.2}%;background:var(--{color})\" title=\"{what}: {:.1} GiB\"></i>",
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
    let mut entries = TERMS.to_vec();
    entries.push(("track", "free"));
    legend(page, &entries);
    page.push_str("</div>\n");
}
