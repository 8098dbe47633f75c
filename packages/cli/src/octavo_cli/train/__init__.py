"""`octavo train`: a small Mixture-of-Experts language model, trained on real text in each recipe.

`config` what to run, `data` the text, `models` the same model in each framework from shared initial parameters and
the comparison of quantized weights, `loop` the training, `report` the losses, figures and page that it leaves behind,
`gates` the training gates, `command` the command line.
"""
