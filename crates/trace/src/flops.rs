//! Floating-point operations of an operator, computed from the shapes of its inputs.
//!
//! Only matrix multiplications count, and only the innermost of nested operators: `aten::linear` and
//! `aten::matmul` count 0, the `aten::addmm` inside them counts. This is the convention behind published MFU
//! numbers. Attention counts full score matrices, causal or not, as PyTorch's FLOP counter does.

/// The floating-point operations of `op` on tensors of `shapes`; a multiply-add counts 2.
///
/// `shapes` are the shapes of the tensor arguments in order, without absent ones. The output shape of a
/// convolution does not follow from its inputs: append it if it is known, otherwise the output is assumed
/// to be as large as the input (stride 1, padded). Unknown operators, and shapes that do not match, count
/// 0.
pub fn flops(op: &str, shapes: &[Vec<i64>]) -> u64 {
    let name = op.strip_prefix("aten::").unwrap_or(op);
    let name = name.split('.').next().unwrap_or(name);
    let shapes: Vec<&[i64]> = shapes.iter().map(Vec::as_slice).collect();
    let count = match name {
        "mm" | "bmm" | "mv" | "dot" | "_scaled_mm" | "_int_mm" => product_flops(&shapes),
        "addmm" | "addmm_" | "baddbmm" | "baddbmm_" | "addmv" | "addmv_" | "_addmm_activation" => {
            product_flops(shapes.get(1..).unwrap_or_default())
        }
        "_grouped_mm" => grouped_product_flops(&shapes),
        "convolution" | "convolution_overrideable" => convolution_flops(&shapes),
        "convolution_backward" | "convolution_backward_overrideable" => {
            convolution_backward_flops(&shapes)
        }
        "_scaled_dot_product_flash_attention_for_cpu"
        | "_scaled_dot_product_flash_attention"
        | "_scaled_dot_product_efficient_attention"
        | "_scaled_dot_product_cudnn_attention" => attention_flops(&shapes, [1, 1]),
        // Recomputed scores and gradients of query and key run over d; gradients of scores and value over e.
        "_scaled_dot_product_flash_attention_for_cpu_backward"
        | "_scaled_dot_product_flash_attention_backward"
        | "_scaled_dot_product_efficient_attention_backward"
        | "_scaled_dot_product_cudnn_attention_backward" => {
            attention_flops(shapes.get(1..).unwrap_or_default(), [3, 2])
        }
        _ => None,
    };
    count.unwrap_or(0)
}

/// `[.., m, k] x [.., k, n]`, where either side may be a vector.
fn product_flops(shapes: &[&[i64]]) -> Option<u64> {
    let [left, right, ..] = shapes else {
        return None;
    };
    let columns = match right {
        [_] => 1,
        [.., columns] => *columns,
        [] => return None,
    };
    multiply(&[2, elements(left)?, u64::try_from(columns).ok()?])
}

/// `[tokens, k] x [experts, k, n]`: every token goes to one expert.
fn grouped_product_flops(shapes: &[&[i64]]) -> Option<u64> {
    match shapes {
        [left @ [_, _], right @ [_, _, _], ..] => product_flops(&[left, right]),
        _ => None,
    }
}

/// `input [n, c_in, ..]`, `weight [c_out, c_in / groups, ..]`, optionally a bias, optionally the output.
fn convolution_flops(shapes: &[&[i64]]) -> Option<u64> {
    let [input, weight, rest @ ..] = shapes else {
        return None;
    };
    let output = rest
        .iter()
        .find(|shape| shape.len() == input.len())
        .unwrap_or(input);
    one_convolution(output, weight)
}

/// `grad_output`, `input`, `weight`: one convolution for each of the two gradients.
fn convolution_backward_flops(shapes: &[&[i64]]) -> Option<u64> {
    let [grad_output, _, weight, ..] = shapes else {
        return None;
    };
    one_convolution(grad_output, weight)?.checked_mul(2)
}

/// Every element of the output is a dot product over one filter.
fn one_convolution(output: &[i64], weight: &[i64]) -> Option<u64> {
    let (batch, positions) = (output.first()?, output.get(2..)?);
    multiply(&[
        2,
        elements(&[*batch])?,
        elements(positions)?,
        elements(weight)?,
    ])
}

/// `query [.., s, d]`, `key [.., t, d]`, `value [.., t, e]`: `over_d` matrix products of the size of the
/// scores with inner dimension `d`, and `over_e` with inner dimension `e`.
fn attention_flops(shapes: &[&[i64]], [over_d, over_e]: [u64; 2]) -> Option<u64> {
    let [[heads @ .., s, d], [.., t, _], [.., e], ..] = shapes else {
        return None;
    };
    let scores = multiply(&[elements(heads)?, elements(&[*s, *t])?])?;
    let depth = (elements(&[*d])?.checked_mul(over_d)?)
        .checked_add(elements(&[*e])?.checked_mul(over_e)?)?;
    multiply(&[2, scores, depth])
}

fn elements(shape: &[i64]) -> Option<u64> {
    shape.iter().try_fold(1u64, |product, &length| {
        product.checked_mul(u64::try_from(length).ok()?)
    })
}

fn multiply(factors: &[u64]) -> Option<u64> {
    factors
        .iter()
        .try_fold(1u64, |product, &factor| product.checked_mul(factor))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn count<const N: usize>(op: &str, shapes: [&[i64]; N]) -> u64 {
        flops(op, &shapes.map(<[i64]>::to_vec))
    }

    #[test]
    fn products() {
        assert_eq!(count("aten::mm", [&[3, 4], &[4, 5]]), 2 * 3 * 4 * 5);
        assert_eq!(
            count("aten::addmm", [&[5], &[3, 4], &[4, 5]]),
            2 * 3 * 4 * 5
        );
        assert_eq!(
            count("aten::bmm", [&[7, 3, 4], &[7, 4, 5]]),
            2 * 7 * 3 * 4 * 5
        );
        assert_eq!(
            count("aten::baddbmm", [&[7, 3, 5], &[7, 3, 4], &[7, 4, 5]]),
            840
        );
        assert_eq!(count("aten::mv", [&[3, 4], &[4]]), 24);
        assert_eq!(
            count("aten::_grouped_mm", [&[100, 4], &[8, 4, 5], &[8]]),
            2 * 100 * 4 * 5
        );
        assert_eq!(count("mm.out", [&[3, 4], &[4, 5], &[3, 5]]), 120);
    }

    #[test]
    fn a_llama_block_costs_six_operations_per_parameter_and_token() {
        let (tokens, hidden, intermediate) = (4096, 4096, 14336);
        let forward = count("aten::mm", [&[tokens, hidden], &[hidden, intermediate]]);
        let grad_input = count(
            "aten::mm",
            [&[tokens, intermediate], &[intermediate, hidden]],
        );
        let grad_weight = count("aten::mm", [&[intermediate, tokens], &[tokens, hidden]]);
        assert_eq!(
            forward + grad_input + grad_weight,
            6 * (tokens * hidden * intermediate) as u64
        );
    }

    #[test]
    fn convolutions() {
        let one = 2 * 8 * 32 * 28 * 28 * 9;
        let (input, weight, output): (&[i64], &[i64], &[i64]) =
            (&[8, 1, 28, 28], &[32, 1, 3, 3], &[8, 32, 28, 28]);
        assert_eq!(count("aten::convolution", [input, weight, &[32]]), one);
        assert_eq!(
            count("aten::convolution", [input, weight, &[32], output]),
            one
        );
        assert_eq!(
            count(
                "aten::convolution",
                [input, weight, &[32], &[8, 32, 14, 14]]
            ),
            one / 4
        );
        assert_eq!(
            count("aten::convolution_backward", [output, input, weight]),
            2 * one
        );
        // Depthwise: each of 64 filters has one input channel.
        assert_eq!(
            count("aten::convolution", [&[1, 64, 10], &[64, 1, 5]]),
            2 * 10 * 64 * 5
        );
    }

    #[test]
    fn attention() {
        let forward = "aten::_scaled_dot_product_flash_attention_for_cpu";
        let backward = "aten::_scaled_dot_product_flash_attention_for_cpu_backward";
        let (query, key): (&[i64], &[i64]) = (&[2, 32, 128, 64], &[2, 8, 256, 64]);
        let product = 2 * 2 * 32 * 128 * 256 * 64;
        assert_eq!(count(forward, [query, key, key]), 2 * product);
        assert_eq!(
            count(backward, [query, query, key, key, query, &[2, 128, 32]]),
            5 * product
        );
    }

    #[test]
    fn unknown_operators_and_mismatched_shapes_count_zero() {
        assert_eq!(count("aten::linear", [&[3, 4], &[5, 4]]), 0);
        assert_eq!(count("aten::add", [&[3, 4], &[3, 4]]), 0);
        assert_eq!(count("aten::mm", [&[3, 4]]), 0);
        assert_eq!(count("aten::mm", [&[], &[]]), 0);
        assert_eq!(count("aten::addmm", []), 0);
        assert_eq!(count("aten::convolution", [&[1], &[1]]), 0);
        assert_eq!(count("aten::mm", [&[-1, 4], &[4, 5]]), 0);
        assert_eq!(
            count("aten::mm", [&[i64::MAX, i64::MAX], &[i64::MAX, 2]]),
            0
        );
    }
}
