"""Search strategies, Brimful's and others', played on landscapes: how many launches does each need?"""
