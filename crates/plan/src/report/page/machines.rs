//! Which GPU of a machine is which rank of every axis, and how machines repeat.

use std::fmt::Write;

use crate::{Cluster, Degrees};

/// More GPUs of one machine than this are not drawn.
const MOST: usize = 32;

/// Axes from the innermost: how far apart its ranks are, and how many there are.
fn strides(degrees: &Degrees) -> Vec<(&'static str, usize, usize)> {
    let mut stride = 1;
    let axes = degrees.axes().into_iter().filter(|(axis, _)| *axis != "ep");
    let inside_out = axes.rev().map(|(axis, size)| {
        let apart = stride;
        stride *= size;
        (axis, apart, size)
    });
    inside_out.filter(|(.., size)| *size > 1).collect()
}

pub(super) fn draw(page: &mut String, cluster: &Cluster, degrees: &Degrees) {
    let axes = strides(degrees);
    let per_machine = cluster.per_machine;
    page.push_str("<div class=\"panel\">\n<div class=\"gpus\">\n");
    for gpu in 0..per_machine.min(MOST) {
        let inside = axes.iter().filter(|(_, apart, _)| *apart < per_machine);
        let coordinates =
            inside.map(|(axis, apart, size)| format!("{axis} {}", gpu / apart % size));
        // GPUs that share every matrix have one colour.
        let tone = 1 + gpu / degrees.tp % 7;
        let _ = writeln!(
            page,
            "<div class=\"gpu\" style=\"--tone:var(--c{tone})\"><b>GPU {gpu}</b>{}</div>",
            coordinates.collect::<Vec<_>>().join("<br>")
        );
    }
    page.push_str("</div>\n<ul>\n");
    for (axis, apart, size) in &axes {
        let _ = writeln!(page, "<li>{}</li>", place(axis, *apart, *size, per_machine));
    }
    if degrees.ep > 1 {
        let within = if degrees.ep <= per_machine {
            "inside a machine"
        } else {
            "over machines"
        };
        let _ = writeln!(
            page,
            "<li><b>ep {}</b> is laid over dp_shard, cp and tp: neighbouring ranks, {within}.</li>",
            degrees.ep
        );
    }
    if axes.is_empty() {
        page.push_str("<li>One rank, which shares nothing.</li>\n");
    }
    page.push_str("</ul></div>\n");
}

fn place(axis: &str, apart: usize, size: usize, per_machine: usize) -> String {
    let what = format!("<b>{axis} {size}</b>");
    if apart * size <= per_machine {
        return match apart {
            1 => format!("{what}: {size} neighbouring GPUs of one machine."),
            _ => format!("{what}: every {apart}th GPU of one machine."),
        };
    }
    if apart >= per_machine {
        let machines = apart / per_machine;
        return match machines {
            1 => format!("{what}: the same GPU of {size} neighbouring machines."),
            _ => format!("{what}: the same GPU of {size} machines, one in every {machines}."),
        };
    }
    let inside = per_machine / apart;
    format!(
        "{what}: {inside} GPUs of every machine, over {} neighbouring machines.",
        size.div_ceil(inside)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_named() {
        let degrees = Degrees {
            pp: 16,
            dp_shard: 64,
            cp: 4,
            tp: 4,
            ..Degrees::ONE
        };
        let said: Vec<String> = strides(&degrees)
            .into_iter()
            .map(|(axis, apart, size)| place(axis, apart, size, 8))
            .collect();
        assert!(
            said[0].contains("4 neighbouring GPUs of one machine"),
            "{said:?}"
        );
        assert!(
            said[1].contains("2 GPUs of every machine, over 2"),
            "{said:?}"
        );
        assert!(said[2].contains("64 machines, one in every 2"), "{said:?}");
        assert!(
            said[3].contains("16 machines, one in every 128"),
            "{said:?}"
        );
    }
}
