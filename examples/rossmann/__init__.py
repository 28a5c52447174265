"""Forecast of the daily sales of drug stores, from the files of Kaggle's competition "Rossmann Store Sales".

`files` has the schemas, `generate` makes such files, `tables` reads them in Spark, `features` engineers columns,
`model` and `training` have the network and the two ways to train it, `report` writes predictions and pictures.
`forecast.py` is the program.
"""
