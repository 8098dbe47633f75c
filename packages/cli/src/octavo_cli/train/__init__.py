"""`octavo train`: a small Mixture-of-Experts language model, trained on real text in each recipe.

`config` what to run, `data` the text, `model` the shapes and the initial parameters that both frameworks share,
`torch_model` and `jax_model` the same model twice, `loop` the training, `bits` the comparison of quantized weights,
`results`, `plots`, `page` and `output` what is left behind, `gates` the training gates, `command` the command line.
"""
